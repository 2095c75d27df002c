# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The schedules by the names that users give."""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from megatron_async.schedules import one_f_one_b, pipedream, two_bw, wpipe
from megatron_async.schedules.actions import (
    DELAYED_BY_ONE,
    SYNCHRONOUS,
    Action,
    Schedule,
    VersionRule,
    stale_versions,
)
from megatron_async.schedules.shape import overlap_problems, raise_problems, shape_problems


class StageActions(Protocol):
    """Lazy plan of a segment for one stage (rank)."""

    def __call__(
        self,
        *,
        stages: int,
        microbatches: int,
        batches: int,
        stage: int,
        first_batch: int = 0,
        versions: VersionRule = ...,
    ) -> Iterator[Action]: ...


@dataclass(frozen=True, slots=True)
class ScheduleDefinition:
    """What distinguishes one schedule from another.

    Attributes:
        name: the name that users give.
        chunks: virtual stages per rank.
        stage_actions: the plan of one stage.
        chunk_versions: (stages, stage) -> default rule of versions for each chunk; the first is the one that
            `make_schedule(versions=...)` replaces.
        version_limits: (stages, stage) -> weight versions that may be alive at once, for each chunk.
        least_microbatches: stages -> micro-batches that a batch must have where more than one are run.
        untaken_sends: stages -> messages of one direction that may be on their way when a stage sends the next one:
            of all earlier ones the table proves that the neighbor has taken them.
        update_per_microbatch: whether every micro-batch is a batch of its own.
    """

    name: str
    chunks: int
    stage_actions: StageActions
    chunk_versions: Callable[[int, int], tuple[VersionRule, ...]]
    version_limits: Callable[[int, int], tuple[int, ...]]
    least_microbatches: Callable[[int], int] = lambda stages: 1
    untaken_sends: Callable[[int], int] = lambda stages: 2
    update_per_microbatch: bool = False

    def weight_copies(self, stages: int, stage: int) -> float:
        """Most weights that a rank holds, in units of its own; chunks are of one size."""
        return sum(self.version_limits(stages, stage)) / self.chunks


def _two_bw(name: str, *, lead: int) -> ScheduleDefinition:
    """2BW in which each stage runs `lead` forwards more ahead than the next one."""
    return ScheduleDefinition(
        name=name,
        chunks=1,
        stage_actions=partial(two_bw.stage_actions, lead=lead, name=name),
        chunk_versions=lambda stages, stage: (DELAYED_BY_ONE,),
        version_limits=lambda stages, stage: (2,),
        least_microbatches=partial(two_bw.least_microbatches, lead=lead),
        untaken_sends=lambda stages: lead + 1,
    )


SCHEDULES: dict[str, ScheduleDefinition] = {
    definition.name: definition
    for definition in (
        ScheduleDefinition(
            name="1f1b",
            chunks=1,
            stage_actions=one_f_one_b.stage_actions,
            chunk_versions=lambda stages, stage: (SYNCHRONOUS,),
            version_limits=lambda stages, stage: (1,),
        ),
        _two_bw("2bw", lead=1),
        ScheduleDefinition(
            name="wpipe",
            chunks=2,
            stage_actions=wpipe.stage_actions,
            chunk_versions=lambda stages, stage: (DELAYED_BY_ONE, SYNCHRONOUS),
            version_limits=lambda stages, stage: (2, 1),
            least_microbatches=lambda stages: stages,
            # Ranks run up to 2P forwards ahead of their backwards.
            untaken_sends=lambda stages: 2 * stages,
        ),
        ScheduleDefinition(
            name="pipedream",
            chunks=1,
            stage_actions=pipedream.stage_actions,
            chunk_versions=lambda stages, stage: (stale_versions(pipedream.stage_delay(stages=stages, stage=stage)),),
            version_limits=lambda stages, stage: (stages - stage,),
            update_per_microbatch=True,
        ),
        _two_bw("2bw-eager", lead=2),
    )
}


def schedule_problems(name: str, *, stages: int, microbatches: int, batches: int, first_batch: int = 0) -> list[str]:
    """Everything that forbids a table of this shape; empty when `make_schedule` accepts it."""
    problems = shape_problems(stages=stages, microbatches=microbatches, batches=batches, first_batch=first_batch)
    if name not in SCHEDULES:
        return [f"unknown schedule {name!r}: choose one of {', '.join(SCHEDULES)}", *problems]
    if not problems:
        least = SCHEDULES[name].least_microbatches(stages)
        problems += overlap_problems(name=name, stages=stages, microbatches=microbatches, least=least)
    return problems


def make_schedule(
    name: str,
    stages: int,
    microbatches: int,
    batches: int,
    *,
    first_batch: int = 0,
    versions: VersionRule | None = None,
) -> Schedule:
    """The complete table of one segment.

    Args:
        name: one of `SCHEDULES`.
        stages: number P of pipeline ranks.
        microbatches: number M of micro-batches per batch.
        batches: number of batches in the segment.
        first_batch: number of the first of them.
        versions: rule of versions in place of the schedule's own; for wpipe that of chunk 0.

    Raises:
        ValueError: lists everything that is wrong with the numbers.
    """
    raise_problems(
        schedule_problems(name, stages=stages, microbatches=microbatches, batches=batches, first_batch=first_batch)
    )
    definition = SCHEDULES[name]
    rules = [definition.chunk_versions(stages, rank) for rank in range(stages)]
    if versions is not None:
        rules = [(versions, *own[1:]) for own in rules]
    return Schedule(
        name=name,
        stages=stages,
        microbatches=microbatches,
        batches=batches,
        first_batch=first_batch,
        chunks=definition.chunks,
        actions=tuple(
            tuple(
                definition.stage_actions(
                    stages=stages,
                    microbatches=microbatches,
                    batches=batches,
                    stage=rank,
                    first_batch=first_batch,
                    versions=rules[rank][0],
                )
            )
            for rank in range(stages)
        ),
        versions=tuple(rules),
        version_limits=tuple(definition.version_limits(stages, rank) for rank in range(stages)),
        microbatches_per_update=1 if definition.update_per_microbatch else microbatches,
        # A norm over all ranks would make every update of the original PipeDream wait for the slowest stage.
        reduction_across_ranks=not definition.update_per_microbatch,
    )


def is_delayed(args: argparse.Namespace) -> bool:
    """Whether a run computes gradients with older weights than it updates: under a delayed schedule or its oracle."""
    return args.pipeline_schedule != "1f1b" or args.gradient_delay is not None
