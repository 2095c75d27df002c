# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Every miniature trains the same on one process and on a pipeline."""

import numpy as np
import pytest

from benchmarks.processes import Pool
from megatron_async.models.presets import PRESETS
from tests.distributed.jobs import Outcome
from tests.distributed.matrix import MODELS
from tests.distributed.test_parity import ATOL, RTOL, assert_same_run

MINIATURES = [name for name, preset in PRESETS.items() if preset.miniature_of]
# One period of the hybrid, so that with two stages one of them holds linear attention only.
SHORT = {"moe-10b-hybrid-mini": "--num-layers 4", "smollm2-360m-mini": "--num-layers 4"}


def train(pool: Pool, arguments: str, ranks: int) -> list[Outcome]:
    return pool.run("tests.distributed.model_jobs:train", arguments.split(), ranks=ranks)


@pytest.mark.parametrize("name", MINIATURES)
def test_two_stages_equal_one_process(pool, name):
    model = f"--model {name} {SHORT.get(name, '')}"
    (expected,) = train(pool, model, 1)
    assert_same_run(train(pool, f"{model} --pipeline-model-parallel-size 2", 2), expected)
    assert expected.losses[-1] < expected.losses[0]


# Sums over ranks are taken in another order; where Adam divides by a gradient near 0, that grows in later steps.
GROWN = 1e-4


def assert_close_weights(outcome: Outcome, expected: Outcome) -> None:
    """Every weight that this rank holds whole, by its norm: Adam may move a single element by much."""
    for name, value in outcome.weights.items():
        right = expected.weights[name]
        if value.shape == right.shape:
            assert np.linalg.norm(value - right) <= GROWN * np.linalg.norm(right), name


LAYOUTS = {
    "TP2": "--tensor-model-parallel-size 2 --sequence-parallel",
    "EP2": "--expert-model-parallel-size 2",
    "full recomputation": "--pipeline-model-parallel-size 2 --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
    "head alone": "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*4|L",
    "uneven stages": "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3",
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hybrid_on_other_layouts(pool, layout):
    """Gated DeltaNet's fused projections, its heads' norm and the experts are cut over ranks and give the same run."""
    model = f"--model moe-10b-hybrid-mini {SHORT['moe-10b-hybrid-mini']}"
    (expected,) = train(pool, model, 1)
    for outcome in train(pool, f"{model} {LAYOUTS[layout]}", 2):
        np.testing.assert_allclose(outcome.grad_norms, expected.grad_norms, rtol=GROWN, atol=ATOL)
        if outcome.losses:
            np.testing.assert_allclose(outcome.losses, expected.losses, rtol=GROWN, atol=ATOL)
        assert_close_weights(outcome, expected)


AS_HYBRID = {
    "2bw, uneven stages": "--pipeline-schedule 2bw --decoder-first-pipeline-num-layers 3 --optimizer muon",
    "2bw, head alone": "--pipeline-schedule 2bw --pipeline-model-parallel-layout Et*4|L",
    "wpipe": "--pipeline-schedule wpipe --clip-grad 0",
    "1f1b, recomputation": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}


@pytest.mark.parametrize("run", [*AS_HYBRID, "latent attention"])
def test_a_gpt_built_as_hybrid_model_gives_the_same_bits(pool, run):
    line = f"--model moe-10b-hybrid-mini --num-layers 4 --pipeline-model-parallel-size 2 {AS_HYBRID.get(run, '')}"
    if run not in AS_HYBRID:
        sizes = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --normalization RMSNorm"
        line = f"{sizes} --swiglu --disable-bias-linear {MODELS['latent']} --pipeline-model-parallel-size 2"
    gpt, hybrid = (train(pool, f"{line} --model-class {name}", 2) for name in ("gpt", "hybrid"))
    for one, other in zip(gpt, hybrid, strict=True):
        assert (one.losses, one.grad_norms) == (other.losses, other.grad_norms)


def test_dense_tensor_parallel_without_sequence_parallel(pool):
    (expected,) = train(pool, "--model smollm2-135m-mini --num-attention-heads 6 --num-query-groups 2", 1)
    split = "--model smollm2-135m-mini --num-attention-heads 6 --num-query-groups 2 --tensor-model-parallel-size 2"
    for outcome in train(pool, split, 2):
        np.testing.assert_allclose(outcome.grad_norms, expected.grad_norms, rtol=GROWN, atol=ATOL)
        np.testing.assert_allclose(outcome.losses, expected.losses, rtol=GROWN, atol=ATOL)


def test_linear_attention_tensor_parallel_without_sequence_parallel(pool):
    """The norm of the heads' outputs has a gradient on every tensor rank; all of them count."""
    dense = (
        "--model smollm2-135m-mini --num-layers 2 --num-attention-heads 6 --num-query-groups 2 "
        "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-num-key-heads 2 "
        "--linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 8"
    )
    (expected,) = train(pool, dense, 1)
    for outcome in train(pool, f"{dense} --tensor-model-parallel-size 2", 2):
        np.testing.assert_allclose(outcome.grad_norms, expected.grad_norms, rtol=GROWN, atol=ATOL)
        np.testing.assert_allclose(outcome.losses, expected.losses, rtol=GROWN, atol=ATOL)


DELAYED = {
    "PP2": (2, ""),
    "PP2xTP2": (4, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "PP2xEP2": (4, "--expert-model-parallel-size 2"),
}
# The dense models have odd numbers of heads, which two tensor-parallel ranks cannot share.
EVEN_HEADS = {
    "smollm2-135m-mini": "--num-attention-heads 6 --num-query-groups 2",
    "smollm2-360m-mini": "--num-attention-heads 10 --num-query-groups 2",
}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        (name, layout)
        for name in MINIATURES
        for layout in DELAYED
        if "EP" not in layout or "num_experts" in PRESETS[name].arguments
    ],
)
def test_every_model_under_the_delay(pool, name, layout):
    ranks, split = DELAYED[layout]
    heads = EVEN_HEADS.get(name, "") if "TP" in layout else ""
    model = f"--model {name} {SHORT.get(name, '')} {heads} --staleness-correction error-feedback"
    (expected,) = train(pool, f"{model} --gradient-delay 1", 1)
    pipeline = f"{model} {split} --pipeline-model-parallel-size 2 --pipeline-schedule 2bw"
    for outcome in train(pool, pipeline, ranks):
        np.testing.assert_allclose(outcome.grad_norms, expected.grad_norms, rtol=GROWN, atol=ATOL)
        if outcome.losses:
            np.testing.assert_allclose(outcome.losses, expected.losses, rtol=GROWN, atol=ATOL)
        assert_close_weights(outcome, expected)


def test_hybrid_in_bf16_stays_finite(pool):
    """Decays, their sums and the state are fp32 whatever the weights are."""
    model = f"--model moe-10b-hybrid-mini {SHORT['moe-10b-hybrid-mini']} --bf16 --train-iters 100 --global-batch-size 1"
    (outcome,) = train(pool, model, 1)
    assert not any(outcome.skipped) and np.isfinite(outcome.grad_norms).all() and len(outcome.losses) == 100
    assert np.mean(outcome.losses[-10:]) < 0.9 * np.mean(outcome.losses[:10])


def test_document_boundaries_hold_on_every_stage(pool):
    """The middle stages read the mask too: with four stages, each of one layer, the losses are those of one process."""
    model = f"--model moe-10b-hybrid-mini {SHORT['moe-10b-hybrid-mini']} --train-iters 1"
    reset = f"{model} --reset-attention-mask"
    (without,), (expected,) = train(pool, model, 1), train(pool, reset, 1)
    assert expected.losses != without.losses, "some sequence holds a boundary"
    outcomes = train(pool, f"{reset} --pipeline-model-parallel-size 4", 4)
    np.testing.assert_allclose(outcomes[-1].losses, expected.losses, rtol=RTOL, atol=ATOL)
