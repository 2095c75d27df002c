# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A few cases of `make options`: initialization, overlap, a resume, inert options, five options at once."""

import pytest

from megatron_async.training.signals import SAVED_ON_REQUEST
from tests.distributed.options import checks, runner, sets_of_five

CHOSEN = ("embedding-init-method-std", "--no-align-grad-reduce", "no-save-optim", "every inert", sets_of_five()[0])


@pytest.mark.parametrize("part", CHOSEN)
def test_the_option_has_its_effect(pool, part):
    ((name, problem),) = [(name, check) for name, check in checks(runner(pool)) if part in name]
    assert problem() is None, name


def test_every_case_has_a_name_of_its_own(pool):
    names = [name for name, _ in checks(runner(pool))]
    assert len(names) == len(set(names)) > 90


def test_a_run_does_not_start_with_unequal_tied_copies(pool):
    words = "--pipeline-model-parallel-size 2 --pipeline-schedule 2bw".split()
    errors = pool.run("tests.distributed.jobs:unequal_tied_copies", words, ranks=2)
    assert ["unequal copies of the tied embedding" in error for error in errors] == [True] * 2


def test_unequal_replicas_end_a_run_before_they_are_saved(pool, tmp_path):
    words = f"--pipeline-model-parallel-size 2 --pipeline-schedule 2bw --save {tmp_path} --save-interval 3".split()
    words += ["--check-weight-hash-across-dp-replicas-interval", "3"]
    errors = pool.run("tests.distributed.jobs:unequal_replicas", words, ranks=4)
    assert [("replicas hold unequal weights" in error, iteration) for error, iteration in errors] == [(True, 3)] * 4
    assert not list(tmp_path.glob("iter_*"))


TWO_BW = "--pipeline-model-parallel-size 2 --pipeline-schedule 2bw --optimizer adam"


def test_which_checkpoints_stay(pool, tmp_path):
    """--save-retain-interval: multiples of it stay beside the newest ones of --keep-last."""
    words = f"{TWO_BW} --train-iters 5 --save {tmp_path} --save-interval 1 --keep-last 1 --save-retain-interval 2"
    pool.run("tests.distributed.jobs:train", words.split(), ranks=2)
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == [f"iter_{number:07}" for number in (2, 4, 5)]


def test_a_run_begins_with_pretrained_weights_and_goes_on_with_its_own(pool, tmp_path):
    """--pretrained-checkpoint, the same command at each start."""

    def losses(words):
        return pool.run("tests.distributed.jobs:train", f"{TWO_BW} {words}".split(), ranks=2)[-1].losses

    base, own = tmp_path / "base", tmp_path / "own"
    losses(f"--save {base} --save-interval 6")
    command = f"--pretrained-checkpoint {base} --save {own} --load {own} --save-interval 2"
    tuned = losses(f"--load {base} --finetune --train-iters 4")
    assert losses(f"{command} --train-iters 4 --exit-interval 2") == tuned[:2]
    assert losses(f"{command} --train-iters 4") == tuned[2:]


def test_a_run_ends_in_time_with_a_checkpoint(pool, tmp_path):
    """--exit-duration-in-mins"""
    words = f"{TWO_BW} --save {tmp_path} --save-interval 100 --exit-duration-in-mins 0"
    outcomes = pool.run("tests.distributed.jobs:train", words.split(), ranks=2)
    assert [outcome.losses for outcome in outcomes] == [[], []]
    assert [outcome.status for outcome in outcomes] == [SAVED_ON_REQUEST] * 2
