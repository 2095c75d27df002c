# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A schedule from outside the package: one function and one registry entry."""

from collections.abc import Iterator, Sequence

from megatron_async.schedules import SCHEDULES, ScheduleDefinition, register
from megatron_async.schedules.actions import Action, Backward, Forward, Reduce, Update
from megatron_async.schedules.segment import Segment
from tests.distributed.jobs import Outcome, train

NAME = "all-forwards-first"


def all_forwards_first(segment: Segment) -> Iterator[Action]:
    """GPipe: all forwards of a batch, then all backwards, then the update."""
    for batch in segment.batches:
        numbers = range(batch * segment.microbatches, (batch + 1) * segment.microbatches)
        yield from (Forward(0, number, segment.versions(batch)) for number in numbers)
        yield from (Backward(0, number, segment.versions(batch)) for number in numbers)
        yield Reduce(0, batch)
        yield Update(0, batch)


DEFINITION = ScheduleDefinition(
    name=NAME,
    summary="GPipe: all forwards, then all backwards",
    actions=all_forwards_first,
    delays=lambda stages, stage: (0,),
    untaken_sends=lambda stages: 10**6,
)


def train_with_it(arguments: Sequence[str]) -> Outcome:
    """`train` with the schedule."""
    register(DEFINITION)
    try:
        return train([*arguments, "--pipeline-schedule", NAME])
    finally:
        del SCHEDULES[NAME]
