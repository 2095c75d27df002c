# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The real schedules against the delay oracle: losses, gradient norms and final weights."""

from functools import cache

import numpy as np
import pytest

from benchmarks.processes import Pool
from tests.distributed.jobs import Outcome

# fp32, six steps: differences come from the order of sums alone.
RTOL, ATOL = 2e-5, 2e-6


def train(pool: Pool, arguments: str, ranks: int, *job_arguments: float) -> list[Outcome]:
    return pool.run("tests.distributed.jobs:train", arguments.split(), *job_arguments, ranks=ranks)


@pytest.fixture(scope="module")
def reference(pool: Pool):
    """One-process runs, each made once."""
    return cache(lambda arguments: train(pool, arguments, 1)[0])


def assert_same_run(pipeline: list[Outcome], expected: Outcome) -> None:
    """Every rank's numbers and the weights of all stages together equal the one-process run's."""
    seen: set[str] = set()
    for outcome in pipeline:
        np.testing.assert_allclose(outcome.grad_norms, expected.grad_norms, rtol=RTOL, atol=ATOL)
        assert outcome.learning_rates == expected.learning_rates
        if outcome.losses:
            np.testing.assert_allclose(outcome.losses, expected.losses, rtol=RTOL, atol=ATOL)
        for name, value in outcome.weights.items():
            np.testing.assert_allclose(value, expected.weights[name], rtol=RTOL, atol=10 * ATOL, err_msg=name)
        seen |= outcome.weights.keys()
    assert any(outcome.losses for outcome in pipeline)
    assert seen == expected.weights.keys()


OPTIMIZERS = {"adam": "--optimizer adam", "muon": "--optimizer muon"}
CORRECTIONS = {"plain": "", "error-feedback": "--staleness-correction error-feedback"}
LAYOUTS = {
    "PP2": (2, "--pipeline-model-parallel-size 2"),
    "PP4": (4, "--pipeline-model-parallel-size 4"),
    "PP2xDP2": (4, "--pipeline-model-parallel-size 2"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_2bw_equals_the_oracle(pool, reference, optimizer, correction, layout):
    ranks, split = LAYOUTS[layout]
    recipe = f"{OPTIMIZERS[optimizer]} {CORRECTIONS[correction]}"
    expected = reference(f"{recipe} --gradient-delay 1")
    assert_same_run(train(pool, f"{recipe} {split} --pipeline-schedule 2bw", ranks), expected)
    assert max(expected.grad_norms) > 1.0 > min(expected.grad_norms) * 0.5, "clipping must be active in some steps"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_1f1b_equals_one_process(pool, reference, optimizer):
    recipe = OPTIMIZERS[optimizer]
    assert_same_run(train(pool, f"{recipe} --pipeline-model-parallel-size 2", 2), reference(recipe))


def test_untied_embeddings(pool, reference):
    recipe = "--optimizer muon --untie-embeddings-and-output-weights"
    pipeline = train(pool, f"{recipe} --pipeline-model-parallel-size 2 --pipeline-schedule 2bw", 2)
    assert_same_run(pipeline, reference(f"{recipe} --gradient-delay 1"))


@pytest.mark.parametrize(
    "phases",
    ["--sync-start-iters 2", "--sync-cooldown-iters 2", "--sync-start-iters 1 --sync-cooldown-iters 3"],
)
def test_synchronous_start_and_cooldown(pool, reference, phases):
    recipe = f"--optimizer adam --staleness-correction error-feedback {phases}"
    pipeline = train(pool, f"{recipe} --pipeline-model-parallel-size 2 --pipeline-schedule 2bw", 2)
    assert_same_run(pipeline, reference(f"{recipe} --gradient-delay 1"))


def assert_bit_equal(left: list[Outcome], right: list[Outcome]) -> None:
    for a, b in zip(left, right, strict=True):
        assert a.losses == b.losses
        assert a.weights.keys() == b.weights.keys()
        for name in a.weights:
            np.testing.assert_array_equal(a.weights[name], b.weights[name], err_msg=name)


ASYNC = (
    "--optimizer muon --staleness-correction error-feedback --pipeline-model-parallel-size 2 --pipeline-schedule 2bw"
)


def test_evaluation_changes_nothing(pool):
    """Draining the pipe for an evaluation must not change the numbers."""
    never = train(pool, ASYNC, 2)
    often = train(pool, f"{ASYNC} --eval-interval 3 --eval-iters 2", 2)
    assert [iteration for iteration, _ in often[-1].validation] == [3, 6]
    assert_bit_equal(never, often)


def test_a_stalling_stage_changes_nothing(pool):
    assert_bit_equal(train(pool, ASYNC, 2), train(pool, ASYNC, 2, 30.0))


def test_the_cut_into_micro_batches_changes_nothing(pool, reference):
    """The gradient is that of the batch, however it is cut."""
    pipeline = train(pool, f"{ASYNC} --micro-batch-size 2", 2)
    assert_same_run(pipeline, reference("--optimizer muon --staleness-correction error-feedback --gradient-delay 1"))


def test_evaluation_sees_the_newest_weights(pool, reference):
    """At the end of training the delayed run is evaluated with the weights of its last update."""
    evaluate = "--eval-interval 6 --eval-iters 2"
    pipeline = train(pool, f"{ASYNC} {evaluate}", 2)
    expected = reference(f"--optimizer muon --staleness-correction error-feedback --gradient-delay 1 {evaluate}")
    np.testing.assert_allclose(pipeline[-1].validation, expected.validation, rtol=RTOL, atol=ATOL)
