# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""In steady state the host asks for no value that a GPU would have to finish first.

Counted on CPUs by operator. Where the operators read tensors that live on the host in a GPU run too, the place is named
here with the reason.
"""

import pytest

RECIPE = (
    "--staleness-correction error-feedback --pipeline-model-parallel-size 2 --pipeline-schedule 2bw --train-iters 8 "
    "--update-launch"
)
EXPERTS = (
    "--num-experts 4 --moe-ffn-hidden-size 32 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-aux-loss-coeff 0.01 --moe-token-dispatcher-type alltoall"
)
ON_THE_HOST = {
    "megatron_async/models/vocabulary.py": "token ids as the loader gives them, before they go to the device",
    "megatron/core/tensor_parallel/random.py": "state of a random generator",
    "megatron_async/pipeline/update.py:_read": "sums that have arrived on the host",
    "megatron_async/pipeline/update.py:_step_or_skip": "the clip factor that the host computes from these sums",
    "megatron_async/optim/step.py:step": "torch counts Adam's steps on the host",
    "megatron_async/checkpoint/state.py:largest": "the agreement to stop, in an empty pipeline",
}


@pytest.mark.parametrize(
    "recipe",
    [
        "at-once --optimizer adam",
        f"when-known --optimizer muon {EXPERTS}",
        "at-once --optimizer muon --model moe-10b-hybrid-mini --num-layers 4",
    ],
    ids=["dense", "experts", "hybrid"],
)
def test_steady_state_asks_for_host_values_only(pool, recipe):
    arguments = f"{RECIPE} {recipe}".split()
    for found in pool.run("tests.distributed.synchronizations:synchronizations", arguments, ranks=2):
        assert found, "the count sees nothing"
        assert [place for place in found if not place.startswith(tuple(ON_THE_HOST))] == []


def test_the_count_would_see_one(pool):
    """Megatron's own step reads the norm of its gradient from the device."""
    arguments = "--optimizer adam --pipeline-model-parallel-size 2 --train-iters 8".split()
    for found in pool.run("tests.distributed.synchronizations:synchronizations", arguments, ranks=2):
        assert any("clip_grads.py" in place or "synchronous.py" in place for place in found)
