# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Options of Megatron's data-parallel wrapper under a delay: the same numbers, or refused."""

import numpy as np
import pytest

# Gradient descent without clipping: a gradient of another size is another loss.
RECIPE = "--optimizer sgd --clip-grad 0 --train-iters 4 --pipeline-model-parallel-size 2"


@pytest.mark.parametrize("schedule", ["2bw", "wpipe --untie-embeddings-and-output-weights"])
def test_averaging_in_the_collective_changes_no_gradient(pool, schedule):
    arguments = f"{RECIPE} --pipeline-schedule {schedule}".split()
    plain = pool.run("tests.distributed.jobs:train", arguments, ranks=4)
    averaged = pool.run("tests.distributed.jobs:train", [*arguments, "--ddp-average-in-collective"], ranks=4)
    np.testing.assert_allclose(averaged[-1].losses, plain[-1].losses, rtol=1e-6)
    np.testing.assert_allclose(averaged[-1].grad_norms, plain[-1].grad_norms, rtol=1e-6)


@pytest.mark.parametrize(
    "option",
    [
        "--ddp-param-name-patterns-for-fp32-local-accumulation all",
        "--ddp-reduce-scatter-with-fp32-accumulation",
    ],
)
def test_options_that_would_be_ignored_are_refused(pool, option):
    lines = [[*f"{RECIPE} --pipeline-schedule 2bw".split(), *option.split()]]
    (problems,) = pool.run("tests.distributed.optimizer_jobs:problems", lines, ranks=1)[0]
    assert any(option.split()[0] in problem for problem in problems)


def test_level_1_timers_hold_no_barrier(pool):
    arguments = f"{RECIPE} --pipeline-schedule 2bw --timing-log-level 1 --train-iters 8".split()
    assert pool.run("tests.distributed.jobs:blocking_calls", arguments, ranks=2) == [[], []]


CHUNKS = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
OVERLAPS = {
    "DP2": (2, "--optimizer adam", ""),
    "layer-wise": (2, "--optimizer muon", ""),
    "two chunks": (4, f"--optimizer adam {CHUNKS}", ""),
    "two chunks, each by itself": (4, f"--optimizer adam {CHUNKS}", "--no-align-param-gather"),
    "2bw": (4, "--optimizer adam --pipeline-model-parallel-size 2 --pipeline-schedule 2bw", ""),
}


@pytest.mark.parametrize("case", OVERLAPS)
def test_weights_gathered_in_forwards_are_the_same(pool, case):
    """Over evaluations, and at the end, where every rank has all of them. Delayed schedules gather by themselves."""
    ranks, words, more = OVERLAPS[case]
    recipe = f"{words} --use-distributed-optimizer --overlap-grad-reduce --ddp-bucket-size 4000 --train-iters 5"
    recipe += " --eval-interval 2 --eval-iters 1"
    job = "tests.distributed.optimizer_jobs:gathers"
    plain = pool.run(job, recipe.split(), ranks=ranks)
    given = pool.run(job, f"{recipe} --overlap-param-gather {more}".split(), ranks=ranks)
    for (outcome, started), (expected, none) in zip(given, plain, strict=True):
        assert (started > 0) == (case != "2bw") and none == 0
        assert (outcome.losses, outcome.validation) == (expected.losses, expected.validation)
        for name, weight in expected.weights.items():
            np.testing.assert_array_equal(outcome.weights[name], weight, err_msg=name)
