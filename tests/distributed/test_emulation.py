# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Emulated compute: schedules and transport run for real around layers that sleep, as in the benchmark."""

import statistics

import pytest

from benchmarks.contenders import LIMIT, OURS
from benchmarks.processes import Pool
from benchmarks.schedules import TOLERANCE
from benchmarks.stack import Pace, emulated_cell

FORWARD, BACKWARD, MICROBATCHES, STAGES = 15.0, 30.0, 4, 2
COMPUTE = MICROBATCHES * (FORWARD + BACKWARD)
SYNCHRONOUS = ["torch-1f1b", "torch-zbv", "megatron-1f1b", "megatron-interleaved-1f1b"]


@pytest.fixture(scope="module")
def outcomes(pool: Pool):
    cell = emulated_cell(STAGES, MICROBATCHES, Pace(FORWARD, BACKWARD), rounds=2, batches=3)
    return pool.run("benchmarks.cell:run", cell, [LIMIT, *SYNCHRONOUS, *OURS], ranks=STAGES, timeout=300)


def test_every_contender_arrives_at_the_weights_of_one_process(outcomes):
    for outcome in outcomes:
        assert outcome.refused == {}
        assert set(outcome.distances) == {LIMIT, *SYNCHRONOUS, *OURS}
        assert max(outcome.distances.values()) <= TOLERANCE


def test_a_batch_takes_as_long_as_its_stages_sleep(outcomes):
    """Never less than the sleeps of one rank; no stage computes anything, whatever the schedule."""
    for outcome in outcomes:
        for name in (LIMIT, *SYNCHRONOUS, *OURS):
            batches = [batch for turn in outcome.turns[name][0] for batch in turn]
            assert sum(batches) >= 0.95 * COMPUTE * len(batches), name


def test_synchronous_batches_pay_for_filling_and_draining(outcomes):
    """Where a batch ends with the optimizer step of every rank."""
    fill = (MICROBATCHES + STAGES - 1) * (FORWARD + BACKWARD)
    for outcome in outcomes:
        times = {name: [batch for turn in own for batch in turn] for name, (own, _) in outcome.turns.items()}
        assert statistics.median(times["torch-1f1b"]) >= 0.99 * fill
        assert statistics.median(times["megatron-1f1b"]) >= 0.99 * fill
