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
