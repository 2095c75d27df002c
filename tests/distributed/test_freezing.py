# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Frozen parameters: without gradient, update and correction; stages without trained parameters pass gradients on."""

import numpy as np
import pytest

from benchmarks.processes import JobFailed
from tests.distributed.test_parity import ATOL, RTOL, assert_same_run
from tests.distributed.test_resume import EF, PP2_2BW, train

SHORT = "--optimizer adam --train-iters 3"
UNTIED = "--untie-embeddings-and-output-weights"
WPIPE = f"{UNTIED} --pipeline-model-parallel-size 2 --pipeline-schedule wpipe"
ROUTERS = (
    "--num-experts 4 --moe-ffn-hidden-size 32 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.1"
)


@pytest.mark.parametrize(
    ("schedule", "oracle"), [(f"{PP2_2BW} {ROUTERS}", f"{ROUTERS} --gradient-delay 1"), (WPIPE, UNTIED)]
)
def test_freeze_all_layers(pool, schedule, oracle):
    """The losses are those of the initial weights, whose learning rate has no effect."""
    frozen = train(pool, f"{SHORT} {EF} --freeze-all-layers {schedule}", 2)
    (expected,) = train(pool, f"{SHORT} --freeze-all-layers {oracle}", 1)
    assert_same_run(frozen, expected)
    (still,) = train(pool, f"{SHORT} --optimizer sgd --lr 1e-30 --min-lr 0 {oracle.replace('0.1', '0.0')}", 1)
    np.testing.assert_allclose(expected.losses, still.losses, rtol=RTOL, atol=ATOL)
    assert expected.learning_rates == expected.grad_norms == [0.0] * 3


def test_a_checkpoint_is_frozen(pool, tmp_path):
    """A trained model goes on frozen, and again; back to training it needs a new optimizer."""
    run = f"--optimizer adam --lr-decay-iters 9 --save {tmp_path} --save-interval 1 {PP2_2BW} --train-iters"
    trained = train(pool, f"{run} 1", 2)
    for iterations in (2, 3):
        frozen = train(pool, f"{run} {iterations} --load {tmp_path} --freeze-all-layers", 2)
        assert len(frozen[-1].losses) == 1
        for before, after in zip(trained, frozen, strict=True):
            assert all((after.weights[name] == weight).all() for name, weight in before.weights.items())
    with pytest.raises(JobFailed, match="saved with --freeze-all-layers"):
        train(pool, f"{run} 4 --load {tmp_path}", 2)


# The first stage as a whole; the head's stage with its tied copy of the embedding.
FROZEN = {
    r"embedding|decoder\.layers\.[01]\.": (UNTIED, f"{UNTIED} {PP2_2BW}"),
    r"embedding|decoder\.(layers\.[23]|final)": ("", PP2_2BW),
    r".*linear_fc1|output_layer": (f"{UNTIED} --gradient-delay wpipe", WPIPE),
}


@pytest.mark.parametrize("pattern", FROZEN)
def test_a_part_is_frozen(pool, pattern, frozen_weights):
    alone, pipeline = FROZEN[pattern]
    delay = "" if "--gradient-delay" in alone else "--gradient-delay 1"
    (expected,) = frozen_weights(pattern, f"{alone} {delay}", 1)
    assert_same_run(frozen_weights(pattern, pipeline, 2), expected)


@pytest.fixture
def frozen_weights(pool):
    def run(pattern: str, words: str, ranks: int):
        recipe = f"{SHORT} {EF} {words}".split()
        return pool.run("tests.distributed.freezing:train_without", pattern, recipe, ranks=ranks)

    return run
