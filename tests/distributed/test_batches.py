# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Batches that are skipped on request, runs that are counted in samples, batches that grow."""

import math

import numpy as np
import pytest

from megatron_async.files import read_json_lines
from tests.distributed.test_parity import ATOL, RTOL
from tests.distributed.test_resume import EF, PP2_2BW, assert_continues, resume, train

ORACLE = "--gradient-delay 1"
SKIP = f"--optimizer adam {EF} --iterations-to-skip 3 4"


def assert_same_losses(pipeline, oracle):
    np.testing.assert_allclose(pipeline[-1].losses, oracle[-1].losses, rtol=RTOL, atol=ATOL)


def test_skipped_batches_change_nothing_but_the_position(pool, saved, tmp_path):
    """Delayed or in one process; the rate waits; a run resumed inside the range is the same."""
    folder, whole = saved(f"{SKIP} {PP2_2BW}", 2)
    file = tmp_path / "metrics.jsonl"
    oracle = train(pool, f"{SKIP} {ORACLE} --metrics-file {file}", 1)
    assert_same_losses(whole, oracle)
    rows = [row for row in read_json_lines(file) if "lm_loss" in row]
    assert [(row["iteration"], row["consumed_samples"]) for row in rows] == [(1, 8), (2, 16), (5, 40), (6, 48)]
    plain = train(pool, f"--optimizer adam {EF} {ORACLE}", 1)[0]
    assert oracle[0].learning_rates == plain.learning_rates[:4]
    assert_continues(resume(pool, folder, 3, f"{SKIP} {PP2_2BW}", 2), whole, 2)


def test_skipped_batches_are_read_and_not_trained(pool):
    """Skipping the last two is stopping before them; at rate 0, others have the losses of a run that skips none."""
    decay = "--optimizer adam --lr-decay-iters 9"
    skipped, shorter = (
        train(pool, f"{decay} {rest}", 1)[0] for rest in ("--iterations-to-skip 5 6", "--train-iters 4")
    )
    assert skipped.losses == shorter.losses
    for name, weight in shorter.weights.items():
        np.testing.assert_array_equal(skipped.weights[name], weight)
    still = "--optimizer sgd --lr 1e-30 --min-lr 0"
    every, some = (train(pool, f"{still} {rest}", 1)[0].losses for rest in ("", "--iterations-to-skip 2 3"))
    assert some == [every[0], *every[3:]]


# Batches of 4, 4, 4, 8, 8, 8, 8 samples of 16 tokens.
SAMPLES = "--train-samples 44 --lr-warmup-samples 8 --lr-decay-samples 44"
GROWING = [*SAMPLES.split(), "--step-batch-size-schedule", "0:4 192:8"]


def grow(pool, arguments: str, ranks: int):
    return pool.run("tests.distributed.jobs:train", [*GROWING, *arguments.split()], ranks=ranks, timeout=600)


def test_growing_batches_under_a_delay_are_those_of_the_oracle(pool, tmp_path):
    recipe, file = f"--optimizer adam {EF}", tmp_path / "metrics.jsonl"
    files = f"--save {tmp_path} --save-interval 2 --metrics-file {file}"
    pipeline, oracle = grow(pool, f"{recipe} {PP2_2BW} {files}", 2), grow(pool, f"{recipe} {ORACLE}", 1)
    assert_same_losses(pipeline, oracle)
    rows = [row for row in read_json_lines(file) if "lm_loss" in row]
    assert [row["consumed_samples"] for row in rows] == [4, 8, 12, 20, 28, 36, 44]
    assert [row["global_batch_size"] for row in rows] == [4] * 3 + [8] * 4
    rates = [row["learning_rate"] for row in rows]
    # The first rate is that of 0 samples, as in Megatron.
    assert rates[:3] == pytest.approx([0.0, 0.01, 0.02])
    at_20 = 0.002 + 0.018 * 0.5 * (1 + math.cos(math.pi * (20 - 8) / (44 - 8)))
    assert rates[4] == pytest.approx(at_20)
    for step in (2, 4):
        assert_continues(grow(pool, f"{recipe} {PP2_2BW} --load {tmp_path} --ckpt-step {step}", 2), pipeline, step)


def test_growing_batches_hold_the_samples_of_constant_ones(pool):
    still = "--optimizer sgd --lr 1e-30 --min-lr 0"
    growing = grow(pool, still, 1)[0].losses
    constant = train(pool, f"{SAMPLES} --global-batch-size 4 {still}", 1)[0].losses
    pairs = [(constant[index] + constant[index + 1]) / 2 for index in (3, 5, 7, 9)]
    assert growing == pytest.approx([*constant[:3], *pairs], rel=1e-6)
