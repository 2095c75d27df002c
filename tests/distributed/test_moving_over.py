# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Checkpoints of Megatron's own training loop go on here, and ours go on there."""

import numpy as np
import pytest

from tests.distributed.test_parity import ATOL, RTOL

PP2 = "--pipeline-model-parallel-size 2"
DELAYED = f"{PP2} --pipeline-schedule 2bw"
CLOSE = {"rtol": RTOL, "atol": 10 * ATOL}
MUON = "--optimizer muon --muon-extra-scale-factor 0.2"
"""Megatron has 1 where this package's default gives 0.2. The two scale a matrix before Newton-Schulz differently."""
OPTIMIZERS = {"adam": ("--optimizer adam --use-distributed-optimizer", {}), "muon": (MUON, CLOSE)}


def here(pool, arguments):
    return pool.run("tests.distributed.jobs:train", arguments.split(), ranks=2)


def megatron(pool, arguments):
    return pool.run("tests.distributed.megatron_jobs:train", arguments.split(), ranks=2)


def assert_same_end(ours, theirs, *, rtol=0.0, atol=0.0):
    """Equal weights after equal losses; Megatron averages the losses of micro-batches in fp32."""
    for outcome, other in zip(ours, theirs, strict=True):
        for name, value in other.weights.items():
            np.testing.assert_allclose(outcome.weights[name], value, rtol=rtol, atol=atol, err_msg=name)
    assert ours[-1].losses == pytest.approx(theirs[-1].losses[-3:], rel=max(rtol, 1e-6))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_of_megatrons_goes_on_here(pool, tmp_path, optimizer):
    """Synchronously to the same weights; with a synchronous start to those of a run that began here."""
    optimizer, tolerance = OPTIMIZERS[optimizer]
    whole = megatron(pool, f"{optimizer} {PP2} --save {tmp_path} --save-interval 3")
    load = f"{optimizer} --load {tmp_path} --ckpt-step 3"
    assert_same_end(here(pool, f"{load} {PP2}"), whole, **tolerance)
    moved = here(pool, f"{load} {DELAYED} --sync-start-iters 4")
    own = here(pool, f"{optimizer} {DELAYED} --sync-start-iters 4")
    assert_same_end(moved, own, **CLOSE)  # a delayed run sums the norm in another order
    assert moved[-1].losses[-1] != pytest.approx(whole[-1].losses[-1], rel=1e-4), "the last batches are delayed"


def test_a_run_of_ours_goes_on_in_megatrons_loop(pool, tmp_path):
    """Megatron takes the newest weights and the optimizer's state, and leaves the older version and the buffer."""
    recipe = f"{MUON} {DELAYED} --staleness-correction error-feedback"
    here(pool, f"{recipe} --save {tmp_path} --save-interval 3 --exit-interval 3")
    load = f"{MUON} {PP2} --load {tmp_path}"
    assert_same_end(here(pool, load), megatron(pool, load), **CLOSE)


def test_a_hybrid_model_goes_on_in_megatrons_loop_of_gpts_and_back(pool, tmp_path):
    """Through `megatron-async convert`, on two stages, with the state of the optimizer."""
    model = f"{MUON} --hybrid-layer-pattern *-*-|*-*-"
    here(pool, f"{model} {DELAYED} --save {tmp_path}/hybrid --save-interval 3 --exit-interval 3")
    converted(pool, "to-gpt", tmp_path / "hybrid", tmp_path / "gpt")
    ours = here(pool, f"{model} {PP2} --load {tmp_path}/hybrid")
    theirs = megatron(pool, f"{MUON} {PP2} --load {tmp_path}/gpt --save {tmp_path}/megatron --save-interval 5")
    assert ours[-1].losses == pytest.approx(theirs[-1].losses, rel=1e-5)
    converted(pool, "to-hybrid", tmp_path / "megatron", tmp_path / "back", "--ckpt-step", "5")
    back = here(pool, f"{model} {PP2} --load {tmp_path}/back")
    assert back[-1].losses == pytest.approx(theirs[-1].losses[-1:], rel=1e-5)


def converted(pool, way, source, target, *more):
    words = [way, "--load", str(source), "--save", str(target), *more]
    assert pool.run("tests.distributed.megatron_jobs:convert", words, ranks=1) == [0]
