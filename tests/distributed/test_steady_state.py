# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""In steady state nothing waits across stages but the links for their neighbors' activations and gradients."""

import pytest

from megatron_async.checkpoint import folder

RECIPE = "--optimizer muon --staleness-correction error-feedback --pipeline-model-parallel-size 2 --train-iters 8"


EXPERTS = (
    "--num-experts 4 --moe-ffn-hidden-size 32 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.01 --moe-token-dispatcher-type alltoall"
)


@pytest.mark.parametrize(
    ("ranks", "schedule"),
    [
        (2, "2bw"),
        (4, "2bw --qk-clip"),
        (2, "2bw-eager"),
        (2, "wpipe --untie-embeddings-and-output-weights"),
        (2, f"2bw {EXPERTS}"),
    ],
)
def test_nothing_waits_across_stages(pool, ranks, schedule):
    arguments = f"{RECIPE} --pipeline-schedule {schedule}"
    assert pool.run("tests.distributed.jobs:blocking_calls", arguments.split(), ranks=ranks) == [[]] * ranks


def test_the_count_would_see_one(pool):
    """Megatron's own step does wait across stages: its gradient norm is one such call for each batch and more."""
    arguments = RECIPE.replace("--staleness-correction error-feedback", "--pipeline-schedule 1f1b")
    for calls in pool.run("tests.distributed.jobs:blocking_calls", arguments.split(), ranks=2):
        assert "all_reduce" in calls


def test_nothing_waits_for_a_checkpoint_that_is_being_written(pool, tmp_path):
    """Saves after batches 2 and 4; counted is what lies between them."""
    files = f"--save {tmp_path} --save-interval 2 --async-save".split()
    arguments = [*RECIPE.replace("--train-iters 8", "--pipeline-schedule 2bw --train-iters 5").split(), *files]
    assert pool.run("tests.distributed.jobs:blocking_calls", arguments, ranks=2) == [[], []]
    assert folder.newest(tmp_path).iteration == 5
