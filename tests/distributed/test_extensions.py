# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A new schedule is one function, a new optimizer one class, each with one registry entry, also from outside the
package."""

import numpy as np
import pytest

from megatron_async.schedules import SCHEDULES, StageCosts, make_schedule, register, simulate, validate
from tests.distributed.extensions import DEFINITION, NAME
from tests.distributed.matrix import difference


@pytest.fixture
def registered():
    register(DEFINITION)
    yield
    del SCHEDULES[NAME]


def test_every_tool_knows_it(registered):
    schedule = make_schedule(NAME, 3, 4, 2)
    validate(schedule)
    assert simulate(schedule, StageCosts(1.0, 2.0)).live_activations == (4.0, 4.0, 4.0)
    with pytest.raises(ValueError, match="already registered"):
        register(DEFINITION)


def test_it_trains_like_megatrons_synchronous_schedule(pool):
    arguments = "--pipeline-model-parallel-size 2 --optimizer muon --train-iters 4".split()
    ours = pool.run("tests.distributed.extensions:train_with_it", arguments, ranks=2)
    megatrons = pool.run("tests.distributed.jobs:train", arguments, ranks=2)
    np.testing.assert_allclose(ours[-1].losses, megatrons[-1].losses, rtol=1e-6)
    for own, other in zip(ours, megatrons, strict=True):
        for name, weight in other.weights.items():
            np.testing.assert_allclose(own.weights[name], weight, rtol=1e-5, atol=1e-6, err_msg=name)


OPTIMIZER_JOB = "tests.distributed.optimizer_jobs:train_with_a_registered_optimizer"


def test_an_optimizer_has_options_and_trains_under_every_schedule(pool):
    recipe = "--staleness-correction error-feedback --lr 0.2"
    oracle, pipeline = "--gradient-delay 1", "--pipeline-model-parallel-size 2 --pipeline-schedule 2bw"
    ((expected, problems),) = pool.run(OPTIMIZER_JOB, f"{recipe} {oracle} --toy-bound 0.01".split(), ranks=1)
    assert problems == ["--toy-bound -1.0: allowed: (0, inf)."]
    assert expected.losses[-1] < expected.losses[0]
    ranks = [
        outcome for outcome, _ in pool.run(OPTIMIZER_JOB, f"{recipe} {pipeline} --toy-bound 0.01".split(), ranks=2)
    ]
    assert difference(ranks, expected, norms=True) <= 2e-5
    ((other, _),) = pool.run(OPTIMIZER_JOB, f"{recipe} {oracle} --toy-bound 0.001".split(), ranks=1)
    assert difference([other], expected, norms=True) > 1e-3
