# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""What an action waits for, and an order in which the actions of all ranks can run."""

from collections import defaultdict
from dataclasses import dataclass

from megatron_async.schedules.actions import Action, Backward, Forward, Reduce, Schedule, Update

Key = tuple[int, str, int, int]
"""Rank, kind, chunk, and micro-batch or batch: names one action of a table."""


def number_of(action: Action) -> int:
    """Micro-batch of a forward or backward, batch of a reduction or update."""
    return action.microbatch if isinstance(action, Forward | Backward) else action.batch


def key_of(rank: int, action: Action) -> Key:
    """Name of an action that is independent of its position."""
    return rank, action.kind, action.chunk, number_of(action)


def previous_stage(schedule: Schedule, rank: int, action: Action) -> Key | None:
    """The forward whose output a forward receives, or the backward whose gradient a backward receives.

    None for a forward of the first virtual stage, a backward of the last one, and for R and U.
    """
    if not isinstance(action, Forward | Backward):
        return None
    virtual_stage = schedule.virtual_stage(rank, action.chunk) + (-1 if isinstance(action, Forward) else 1)
    if not 0 <= virtual_stage < schedule.stages * schedule.chunks:
        return None
    source, chunk = schedule.place_of(virtual_stage)
    return source, action.kind, chunk, action.microbatch


def predecessors(schedule: Schedule, rank: int, action: Action) -> tuple[Key, ...]:
    """Actions that must have finished before this one, apart from those before it on its rank."""
    if isinstance(action, Update):
        ranks = range(schedule.stages) if schedule.reduction_across_ranks else (rank,)
        return tuple((other, Reduce.kind, action.chunk, action.batch) for other in ranks)
    received = previous_stage(schedule, rank, action)
    needed = () if received is None else (received,)
    if isinstance(action, Backward):
        return (*needed, (rank, Forward.kind, action.chunk, action.microbatch))
    return needed


@dataclass(frozen=True, slots=True)
class Execution:
    """Result of running a table with every rank in its own order.

    Attributes:
        order: (rank, step) of every action that could run, each after all that it waits for.
        blocked: for each rank that got stuck, its step and the action that it waits for.
    """

    order: tuple[tuple[int, int], ...]
    blocked: dict[int, tuple[int, Key]]


def execute(schedule: Schedule) -> Execution:
    """Run the table without times: each rank goes on until it waits for an action that has not run."""
    order: list[tuple[int, int]] = []
    finished: set[Key] = set()
    waiting: defaultdict[Key, list[int]] = defaultdict(list)
    blocked: dict[int, tuple[int, Key]] = {}
    steps = [0] * schedule.stages
    runnable = list(reversed(range(schedule.stages)))
    while runnable:
        rank = runnable.pop()
        row = schedule.actions[rank]
        blocked.pop(rank, None)
        while steps[rank] < len(row):
            action = row[steps[rank]]
            missing = next((key for key in predecessors(schedule, rank, action) if key not in finished), None)
            if missing is not None:
                waiting[missing].append(rank)
                blocked[rank] = steps[rank], missing
                break
            key = key_of(rank, action)
            finished.add(key)
            order.append((rank, steps[rank]))
            steps[rank] += 1
            runnable.extend(waiting.pop(key, ()))
    return Execution(order=tuple(order), blocked=blocked)
