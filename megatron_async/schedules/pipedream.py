# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Original PipeDream (SOSP 2019): an update after every backward, with stashed weight versions."""

from collections.abc import Iterator

from megatron_async.schedules.actions import (
    Action,
    Backward,
    Forward,
    Reduce,
    Update,
    VersionRule,
    stale_versions,
)
from megatron_async.schedules.shape import check_stage


def stage_delay(*, stages: int, stage: int) -> int:
    """Gradient delay of a stage in optimizer steps: P-1-s, the forwards it runs ahead of its backwards."""
    return stages - 1 - stage


def stage_actions(
    *,
    stages: int,
    microbatches: int,
    batches: int,
    stage: int,
    first_batch: int = 0,
    versions: VersionRule | None = None,
) -> Iterator[Action]:
    """Lazy plan of a segment for one stage.

    Every micro-batch is a batch of its own: micro-batches first_batch * M .. (first_batch + batches) * M - 1
    are run, and the batch numbers of R and U are micro-batch numbers. Micro-batch i uses the newest version
    that exists at the stage in an endless stream, max(i - (P-1-s), 0), forward and backward; P-s versions are
    alive. The rule goes by the absolute number, so a drain changes no number.

    Args:
        versions: rule of versions by micro-batch number; None takes the one above.

    Raises:
        ValueError: numbers out of range.
    """
    check_stage(stages=stages, microbatches=microbatches, batches=batches, stage=stage, first_batch=first_batch)
    delay = stage_delay(stages=stages, stage=stage)
    numbers = range(first_batch * microbatches, (first_batch + batches) * microbatches)
    return _stream(numbers, delay, stale_versions(delay) if versions is None else versions)


def _stream(numbers: range, delay: int, versions: VersionRule) -> Iterator[Action]:
    for microbatch in range(numbers.start, numbers.stop + delay):
        if microbatch in numbers:
            yield Forward(0, microbatch, versions(microbatch))
        done = microbatch - delay
        if done in numbers:
            yield Backward(0, done, versions(done))
            yield Reduce(0, done)
            yield Update(0, done)
