# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""PipeDream-2BW (arXiv 2006.09503): 1F1B without flushes, gradients one step old, two versions."""

from collections.abc import Iterator

from megatron_async.schedules.actions import DELAYED_BY_ONE, Action, VersionRule
from megatron_async.schedules.shape import check_stage, overlap_problems, raise_problems
from megatron_async.schedules.stream import stream_actions


def stage_actions(
    *,
    stages: int,
    microbatches: int,
    batches: int,
    stage: int,
    first_batch: int = 0,
    versions: VersionRule = DELAYED_BY_ONE,
) -> Iterator[Action]:
    """Lazy plan of a segment for one stage.

    The pipe is empty before the segment, fills once, runs batches first_batch .. first_batch + batches - 1 as
    one 1F1B stream and drains at the end. R(b) follows the last backward of batch b; U(b) comes immediately
    before the first forward of batch b+2, or after the last backward of the segment if b+2 is not in it.
    Segments compose: versions go by the number of the batch, so a drain changes no number.

    A running segment may be shortened: for n' < n batches with n' >= b + 3 - first_batch, the plans for n'
    and n batches are the same up to and including U(b).

    Raises:
        ValueError: numbers out of range, or several batches of fewer micro-batches than stages. A single
            batch never overlaps with another one and may have any number.
    """
    check_stage(stages=stages, microbatches=microbatches, batches=batches, stage=stage, first_batch=first_batch)
    if batches > 1:
        raise_problems(overlap_problems(name="2bw", stages=stages, microbatches=microbatches))
    return stream_actions(
        stages=stages,
        microbatches=microbatches,
        batches=batches,
        stage=stage,
        first_batch=first_batch,
        versions=versions,
    )
