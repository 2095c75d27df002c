# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The routers' losses weigh the same on every layout; experts without tokens do no harm."""

import re
from functools import cache

import numpy as np
import pytest

from benchmarks.processes import Pool

# Large coefficients, plain gradient descent, one step: what a weight changes by is the gradient.
MODEL = (
    "--num-layers 2 --num-experts 4 --moe-ffn-hidden-size 16 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
    "--optimizer sgd --sgd-momentum 0 --lr 1 --min-lr 1 --lr-warmup-iters 0 --weight-decay 0 --clip-grad 0 "
    "--train-iters 1 --untie-embeddings-and-output-weights"
)
LOSSES = {
    "aux": "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 2",
    "sequence": "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 2",
    "z": "--moe-z-loss-coeff 0.1",
}
PER_TOKEN = "--calculate-per-token-loss"
PP2 = "--pipeline-model-parallel-size 2"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
EP2 = "--expert-model-parallel-size 2"
LAYOUTS = {
    "one process": (1, ""),
    "PP2, 2bw": (2, f"{PP2} --pipeline-schedule 2bw"),
    "TP2": (2, TP2),
    "DP2": (2, ""),
    "EP2": (2, EP2),
}
# Another cut of the same batch. The loss over a micro-batch depends on which sequences are in it; the other two do not.
CUTS = {
    "micro-batches of 4, PP2, 2bw": (2, f"{PP2} --pipeline-schedule 2bw --micro-batch-size 4"),
    "micro-batches of 2, TP2": (2, f"{TP2} --micro-batch-size 2"),
}
MEAN, TOKEN = ("TP2", "EP2", "PP2, 2bw"), ("one process", "TP2", "DP2", "PP2, 2bw")
GRID = [
    *((loss, layout, "") for loss in LOSSES for layout in MEAN),
    *((loss, layout, PER_TOKEN) for loss in LOSSES for layout in TOKEN),
    *((loss, cut, mode) for loss in ("sequence", "z") for cut in CUTS for mode in ("", PER_TOKEN)),
]


def updates(pool: Pool, arguments: str, ranks: int) -> list[dict[str, np.ndarray]]:
    job = "tests.distributed.moe_jobs:updates_without_a_main_loss"
    return pool.run(job, f"{MODEL} {arguments}".split(), ranks=ranks)


@pytest.fixture(scope="module")
def reference(pool: Pool):
    return cache(lambda loss: updates(pool, LOSSES[loss], 1)[0])


@pytest.mark.parametrize(("loss", "layout", "mode"), GRID)
def test_a_routers_loss_weighs_the_same(pool, reference, loss, layout, mode):
    ranks, arguments = (LAYOUTS | CUTS)[layout]
    expected, seen = reference(loss), set()
    for outcome in updates(pool, f"{LOSSES[loss]} {arguments} {mode}", ranks):
        for name in (name for name, change in outcome.items() if change.shape == expected[name].shape):
            # A weight's own rounding is what is left over.
            close = max(1e-3 * np.abs(expected[name]).max(), 3e-7)
            np.testing.assert_allclose(outcome[name], expected[name], rtol=0, atol=close, err_msg=name)
            seen.add(name)
    routers = {name for name in expected if ".router." in name}
    assert len(routers) == 2 and routers <= seen
    assert all(np.abs(expected[name]).max() > 1e-3 for name in routers)


@pytest.mark.parametrize("loss", LOSSES)
def test_twice_the_coefficient_is_twice_the_gradient(pool, reference, loss):
    (*_, flag, coefficient) = LOSSES[loss].split()
    kind = " ".join(LOSSES[loss].split()[:-2])
    (doubled,) = updates(pool, f"{kind} {flag} {2 * float(coefficient)}", 1)
    # The last router's gradient passes through no other router, so nothing else changes it.
    name = "decoder.layers.1.mlp.router.weight"
    np.testing.assert_allclose(doubled[name], 2 * reference(loss)[name], rtol=1e-4, atol=1e-7)


IDLE = (
    "--num-layers 2 --num-experts 16 --moe-ffn-hidden-size 16 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0 "
    "--moe-grouped-gemm --untie-embeddings-and-output-weights --train-iters 3 --lr 0.01 --min-lr 0.01 "
    "--lr-warmup-iters 0 --weight-decay 0.1"
)


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
@pytest.mark.parametrize("layout", ["EP2", "PP2, 2bw"])
def test_experts_without_tokens(pool, optimizer, layout):
    """One expert-parallel rank gets no token at all: it takes part in every exchange, its weights only decay."""
    ranks, split = LAYOUTS[layout]
    recipe = f"{IDLE} --optimizer {optimizer}"
    job = "tests.distributed.moe_jobs:train_with_idle_experts"
    delay = "--gradient-delay 1" if "2bw" in split else ""
    (expected,) = pool.run(job, f"{recipe} {delay}".split(), ranks=1)
    outcomes = pool.run(job, f"{recipe} {split}".split(), ranks=ranks)
    assert np.isfinite(expected.losses).all()
    idle = 0
    for outcome in (*outcomes, expected):
        np.testing.assert_allclose(outcome.losses, expected.losses[: len(outcome.losses)], rtol=2e-5)
        for name, before in outcome.before.items():
            after = outcome.after[name]
            assert np.isfinite(after).all(), name
            np.testing.assert_allclose(after, expected.after[name], rtol=2e-5, atol=2e-5, err_msg=name)
            if int(re.search(r"(?:local_experts\.|weight)(\d+)", name)[1]) >= 8:
                np.testing.assert_allclose(after, before * (1 - 0.01 * 0.1) ** 3, rtol=1e-5, err_msg=name)
                idle += 1
    assert idle == 2 * 2 * 2 * 8  # two runs, two matrices, two layers
