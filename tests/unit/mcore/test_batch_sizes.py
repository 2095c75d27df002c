# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Batch sizes that change with the samples before."""

import argparse

import pytest

from megatron_async import platform

platform.activate("cpu")

from megatron_async.config import arguments  # noqa: E402
from megatron_async.mcore.batch_sizes import BatchSizes, ramp  # noqa: E402
from tests.distributed.jobs import BASE, line  # noqa: E402


@pytest.mark.parametrize("steps", [((0, 4),), ((0, 4), (12, 8)), ((0, 4), (10, 8), (11, 16), (100, 32))])
def test_closed_forms_are_those_of_counting(steps):
    sizes, consumed = BatchSizes(steps), [0]
    while len(consumed) < 30:
        consumed.append(consumed[-1] + sizes.at(consumed[-1]))
    assert [sizes.before(batch) for batch in range(30)] == consumed
    for samples in range(1, consumed[-1] + 1):
        fewest = next(batch for batch, before in enumerate(consumed) if before >= samples)
        assert sizes.batches(samples) == fewest, samples
    for batch, before in enumerate(consumed[:20]):
        later = [number for number in range(batch, 29) if sizes.at(consumed[number]) != sizes.at(before)]
        expected = later[0] - batch if later else None
        change = sizes.batches_to_change(before)
        assert change == expected or (expected is None and before + change * sizes.at(before) > consumed[-2])


def rampup(consumed, start, increment, samples, largest):
    """Batch size of Megatron-LM's `RampupBatchsizeNumMicroBatchesCalculator.update` (removed in Megatron-Core 0.19)."""
    if samples == 0 or consumed > samples:
        return largest
    per_increment = samples / ((largest - start) // increment)
    return start + int(consumed / per_increment) * increment


@pytest.mark.parametrize(
    ("start", "increment", "samples", "largest"), [(4, 2, 32, 8), (16, 8, 300, 64), (2, 2, 3, 12), (4, 4, 0, 8)]
)
def test_a_ramp_is_the_schedule_that_it_means(start, increment, samples, largest):
    args = argparse.Namespace(step_batch_size_schedule=ramp((start, increment, samples), largest, 16), seq_length=16)
    sizes, consumed = BatchSizes.of(args), 0
    for _ in range(40):
        assert sizes.at(consumed) == rampup(consumed, start, increment, samples, largest), consumed
        consumed += sizes.at(consumed)


def test_a_ramp_reaches_megatron_and_the_learning_rate(monkeypatch):
    """A script with --rampup-batch-size runs as it is; a resume may have the schedule instead of the ramp."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    counted = "--train-samples 44 --lr-warmup-samples 8 --lr-decay-samples 44".split()
    ramped = arguments.parse(line([*counted, *"--global-batch-size 8 --rampup-batch-size 4 4 12".split()]))
    stepped = arguments.parse(line([*counted, "--step-batch-size-schedule", "0:4 192:8"]))
    assert ramped._resolved == stepped._resolved
    assert "taken as --step-batch-size-schedule" in ramped._notices[0]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--rampup-batch-size 0 2 4", "must be at least 1"),
        ("--rampup-batch-size 16 2 4", "must be START 16"),
        ("--rampup-batch-size 4 2 8 --step-batch-size-schedule 0:8", "give one of them"),
    ],
)
def test_a_ramp_that_cannot_be_taken(words, reason):
    with pytest.raises(arguments.ArgumentProblems) as raised:
        arguments.parse([*BASE, *words.split()])
    assert any(problem.startswith("--rampup-batch-size") and reason in problem for problem in raised.value.problems)
