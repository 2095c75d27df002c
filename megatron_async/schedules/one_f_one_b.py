# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Synchronous 1F1B (PipeDream-Flush): the pipe drains and the weights are updated after every batch."""

from collections.abc import Iterator

from megatron_async.schedules.actions import SYNCHRONOUS, Action, VersionRule
from megatron_async.schedules.shape import check_stage
from megatron_async.schedules.stream import stream_actions


def stage_actions(
    *,
    stages: int,
    microbatches: int,
    batches: int,
    stage: int,
    first_batch: int = 0,
    versions: VersionRule = SYNCHRONOUS,
) -> Iterator[Action]:
    """Lazy plan for one stage: `batches` drained segments of one batch each, one after another.

    Any number of micro-batches is allowed. `versions` is a rule of versions that holds only the versions
    which exist when the pipe is empty; the default is the synchronous W_b.

    Raises:
        ValueError: numbers out of range.
    """
    check_stage(stages=stages, microbatches=microbatches, batches=batches, stage=stage, first_batch=first_batch)
    return _segments(stages, microbatches, range(first_batch, first_batch + batches), stage, versions)


def _segments(stages: int, microbatches: int, numbers: range, stage: int, versions: VersionRule) -> Iterator[Action]:
    for batch in numbers:
        yield from stream_actions(
            microbatches=microbatches, batches=1, first_batch=batch, versions=versions, warmup=stages - 1 - stage
        )
