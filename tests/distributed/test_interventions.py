# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""What a person may change on resume: the learning rate, hyper-parameters, the start of another run."""

import numpy as np
import pytest

from tests.distributed.matrix import UNTIED
from tests.distributed.test_resume import EF, assert_continues, resume, train

RECIPE = f"--optimizer adam {EF} --pipeline-model-parallel-size 2 --pipeline-schedule 2bw"
OTHER_RATE = "--lr 0.05 --min-lr 0.005 --decoupled-lr 0.04 --decoupled-min-lr 0.004"


@pytest.fixture(scope="module")
def run(pool, saved):
    """Folder and outcomes of a run of six batches."""
    return saved(RECIPE, 2)


def assert_the_third_batch_is_the_first_to_differ(resumed, whole):
    """Two batches are computed with saved weights; the update after the first of them is the new one."""
    norms, expected = resumed[0].grad_norms, whole[0].grad_norms[3:]
    assert norms[:2] == pytest.approx(expected[:2], rel=1e-9) and norms[2] != pytest.approx(expected[2], rel=1e-4)


def test_a_new_rate_is_taken_and_the_state_stays(pool, run):
    folder, whole = run
    rates = train(pool, f"{RECIPE} {OTHER_RATE} --train-iters 6", 2)[0].learning_rates
    resumed = resume(pool, folder, 3, f"{RECIPE} {OTHER_RATE} --override-opt_param-scheduler", 2)
    assert resumed[0].learning_rates == rates[3:] != whole[0].learning_rates[3:]
    assert_the_third_batch_is_the_first_to_differ(resumed, whole)


def test_the_saved_rate_wins(pool, run):
    folder, whole = run
    assert_continues(
        resume(pool, folder, 3, f"{RECIPE} {OTHER_RATE} --use-checkpoint-opt_param-scheduler", 2), whole, 3
    )


def test_hyper_parameters_are_those_of_the_command_line(pool, run):
    folder, whole = run
    resumed = resume(pool, folder, 3, f"{RECIPE} --adam-beta1 0.5", 2)
    assert_the_third_batch_is_the_first_to_differ(resumed, whole)


def test_fine_tuning_begins_the_schedule_anew(pool, run):
    folder, whole = run
    tuned = resume(pool, folder, 3, f"{RECIPE} --finetune", 2)
    assert tuned[0].learning_rates == whole[0].learning_rates
    assert tuned[-1].losses[0] != whole[-1].losses[0], "from other weights"


def test_embedding_and_head_have_their_own_rate_on_every_stage(pool):
    """Adam's first step changes an element by the rate; the logged rate is the main one on every stage."""
    rates = "--lr 0.01 --decoupled-lr 1e-4 --decoupled-min-lr 1e-5 --lr-warmup-iters 0 --weight-decay 0 --train-iters 1"
    layout = f"{UNTIED} --pipeline-model-parallel-size 2 --pipeline-schedule 2bw"
    arguments = f"--optimizer adam {rates} {UNTIED}".split()
    ((before, _),) = pool.run("tests.distributed.jobs:initial_state", arguments, 0, ranks=1)
    for outcome in train(pool, f"--optimizer adam {rates} {layout}", 2):
        assert outcome.learning_rates == [0.01] and outcome.weights
        for name, weight in outcome.weights.items():
            rate = 1e-4 if name.startswith(("embedding.", "output_layer.")) else 1e-2
            assert np.abs(weight - before[name]).max() == pytest.approx(rate, rel=0.02), name
