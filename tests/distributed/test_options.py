# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A few cases of `make options`: initialization, data-parallel overlap, a resume, five options at once."""

import pytest

from tests.distributed.options import checks, runner, sets_of_five

CHOSEN = ("embedding-init-method-std", "--overlap-grad-reduce", "no-save-optim", sets_of_five()[0])


@pytest.mark.parametrize("part", CHOSEN)
def test_the_option_has_its_effect(pool, part):
    ((name, problem),) = [(name, check) for name, check in checks(runner(pool)) if part in name]
    assert problem() is None, name


def test_every_case_has_a_name_of_its_own(pool):
    names = [name for name, _ in checks(runner(pool))]
    assert len(names) == len(set(names)) > 90


def test_a_run_does_not_start_with_unequal_tied_copies(pool):
    words = "--pipeline-model-parallel-size 2 --pipeline-schedule 2bw".split()
    assert pool.run("tests.distributed.jobs:unequal_tied_copies", words, ranks=2) == ["TiedCopiesDiffer"] * 2


def test_unequal_replicas_end_a_run_before_they_are_saved(pool, tmp_path):
    words = f"--pipeline-model-parallel-size 2 --pipeline-schedule 2bw --save {tmp_path} --save-interval 3".split()
    words += ["--check-weight-hash-across-dp-replicas-interval", "3"]
    assert pool.run("tests.distributed.jobs:unequal_replicas", words, ranks=4) == [("ReplicasDiffer", 3)] * 4
    assert not list(tmp_path.glob("iter_*"))
