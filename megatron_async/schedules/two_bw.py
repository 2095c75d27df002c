# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""PipeDream-2BW (arXiv 2006.09503): 1F1B without flushes, gradients one step old, two versions.

Stage s runs P-1-s forwards ahead of its backwards, each stage one more than the next. That is just enough where
transfers are free: between two neighbors, the round from a forward over its successor back to the next forward is
two slots of F + B and two transfers long and has to fit into two slots.

The eager stream runs 2 (P-1-s) ahead, two more than the next stage (eager 1F1B, arXiv 2211.05322), so that the
round has three slots: transfers of up to (F + B) / 2 cost nothing. It holds nearly twice the activations.
"""

from collections.abc import Iterator

from megatron_async.schedules.actions import DELAYED_BY_ONE, Action, VersionRule
from megatron_async.schedules.shape import check_stage, overlap_problems, raise_problems
from megatron_async.schedules.stream import stream_actions


def least_microbatches(stages: int, *, lead: int = 1) -> int:
    """Micro-batches that a batch must have: as many as stage 0 has in flight."""
    return lead * (stages - 1) + 1


def stage_actions(
    *,
    stages: int,
    microbatches: int,
    batches: int,
    stage: int,
    first_batch: int = 0,
    versions: VersionRule = DELAYED_BY_ONE,
    lead: int = 1,
    name: str = "2bw",
) -> Iterator[Action]:
    """Lazy plan of a segment for one stage.

    The pipe is empty before the segment, fills once, runs batches first_batch .. first_batch + batches - 1 as
    one 1F1B stream and drains at the end. R(b) follows the last backward of batch b; U(b) comes immediately
    before the first forward of batch b+2, or after the last backward of the segment if b+2 is not in it.
    Segments compose: versions go by the number of the batch, so a drain changes no number.

    A running segment may be shortened: for n' < n batches with n' >= b + 3 - first_batch, the plans for n'
    and n batches are the same up to and including U(b).

    Args:
        lead: forwards that a stage runs ahead of its backwards beyond those of the next stage: 1, or 2 for the
            eager stream.
        name: of the schedule, for messages.

    Raises:
        ValueError: numbers out of range, or several batches of too few micro-batches. A single batch never
            overlaps with another one and may have any number.
    """
    check_stage(stages=stages, microbatches=microbatches, batches=batches, stage=stage, first_batch=first_batch)
    if batches > 1:
        least = least_microbatches(stages, lead=lead)
        raise_problems(overlap_problems(name=name, stages=stages, microbatches=microbatches, least=least))
    return stream_actions(
        microbatches=microbatches,
        batches=batches,
        first_batch=first_batch,
        versions=versions,
        warmup=lead * (stages - 1 - stage),
    )
