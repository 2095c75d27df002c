# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A few cases of `make options`: initialization, data-parallel overlap, a resume."""

import pytest

from tests.distributed.options import checks, runner

CHOSEN = ("embedding-init-method-std", "mup-embedding-mult", "DP2:  | --overlap-grad-reduce", "no-save-optim")


@pytest.mark.parametrize("part", CHOSEN)
def test_the_option_has_its_effect(pool, part):
    ((name, problem),) = [(name, check) for name, check in checks(runner(pool)) if part in name]
    assert problem() is None, name


def test_every_case_has_a_name_of_its_own(pool):
    names = [name for name, _ in checks(runner(pool))]
    assert len(names) == len(set(names)) > 100


def test_a_run_does_not_start_with_unequal_tied_copies(pool):
    words = "--pipeline-model-parallel-size 2 --pipeline-schedule 2bw".split()
    assert pool.run("tests.distributed.jobs:unequal_tied_copies", words, ranks=2) == ["TiedCopiesDiffer"] * 2


@pytest.mark.parametrize(
    ("ranks", "layout"), [(2, ""), (4, "--pipeline-model-parallel-size 2 --pipeline-schedule 2bw")]
)
def test_unequal_replicas_end_a_run(pool, tmp_path, ranks, layout):
    words = f"{layout} --check-weight-hash-across-dp-replicas-interval 3 --save {tmp_path} --save-interval 3".split()
    found = pool.run("tests.distributed.jobs:unequal_replicas", words, ranks=ranks)
    assert found == [("ReplicasDiffer", 3)] * ranks
    assert not list(tmp_path.glob("iter_*"))
