# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are written while training goes on."""

import pytest

from benchmarks.processes import JobFailed
from megatron_async.checkpoint import folder
from tests.distributed.test_resume import EF, PP2, assert_continues, resume, train

TWO_BW = f"--optimizer adam {EF} {PP2} --pipeline-schedule 2bw"
RECIPES = {
    "2bw": TWO_BW,
    "flat buffers": "--optimizer adam --use-distributed-optimizer",
}


@pytest.mark.parametrize("kind", RECIPES)
def test_a_checkpoint_holds_the_moment_at_which_it_was_asked_for(pool, tmp_path, kind):
    """Written when every tensor in it has changed since, it is still what a run goes on from bit by bit."""
    files = f"--save {tmp_path} --save-interval 3 --async-save"
    late = pool.run("tests.distributed.resume_jobs:train_with_late_writes", f"{RECIPES[kind]} {files}".split(), ranks=2)
    whole = train(pool, RECIPES[kind], 2)
    assert_continues(late, whole, 0)
    assert_continues(resume(pool, tmp_path, 3, RECIPES[kind], 2), whole, 3)
    assert [(entry.iteration, entry.problems) for entry in folder.checkpoints(tmp_path)] == [(6, ()), (3, ())]


@pytest.mark.parametrize(("place", "rank"), [("tensors", 1), ("manifest", 0)])
def test_a_failure_in_the_background_ends_every_rank_before_the_next_save(pool, tmp_path, place, rank):
    arguments = f"{TWO_BW} --save {tmp_path} --save-interval 10 --train-iters 30 --async-save".split()
    outcomes = pool.run("tests.distributed.resume_jobs:save_fails_behind", arguments, rank, place, ranks=2)
    for message, iteration in outcomes:
        assert "iteration 10" in message and f"rank {rank}: OSError: [Errno 28] No space left on device" in message
        assert 10 <= iteration < 20
    assert folder.checkpoints(tmp_path) == []
    assert not any((tmp_path / folder.STAGING).iterdir())


def test_killed_while_writing(pool, tmp_path):
    train(pool, f"{TWO_BW} --save {tmp_path} --save-interval 100 --exit-interval 2", 2)
    files = f"--save {tmp_path} --load {tmp_path} --save-interval 4 --async-save"
    with pytest.raises(JobFailed, match="the process ended"):
        pool.run("tests.distributed.resume_jobs:die_while_writing", f"{TWO_BW} {files}".split(), 1, ranks=2)
    staged = tmp_path / folder.STAGING / folder.name_of(4)
    assert staged.is_dir(), "it was not killed while writing"
    assert [(entry.iteration, entry.problems) for entry in folder.checkpoints(tmp_path)] == [(2, ())]
    assert len(train(pool, f"{TWO_BW} --load {tmp_path}", 2)[0].grad_norms) == 4
