# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Dependencies between actions, and an order in which the actions of all ranks can run."""

from collections import defaultdict

from megatron_async.schedules.actions import Action, Backward, Compute, Forward, Reduce, Schedule, Update

Key = tuple[int, str, int, int]
"""Rank, kind, chunk, and micro-batch or batch: identifies one action of a table."""


def key_of(rank: int, action: Action) -> Key:
    """Identity of an action, independent of its position."""
    return rank, action.kind, action.chunk, action.number


def previous_stage(schedule: Schedule, rank: int, action: Action) -> Key | None:
    """The action that sends the input of a forward or backward.

    None for a forward of the first virtual stage, a backward of the last one, and for R and U.
    """
    if not isinstance(action, Compute):
        return None
    virtual_stage = schedule.virtual_stage(rank, action.chunk) + (-1 if isinstance(action, Forward) else 1)
    if not 0 <= virtual_stage < schedule.stages * schedule.chunks:
        return None
    source, chunk = schedule.place_of(virtual_stage)
    return source, action.kind, chunk, action.microbatch


def predecessors(schedule: Schedule, rank: int, action: Action) -> tuple[Key, ...]:
    """Actions that must finish before this one, besides the earlier actions of its rank."""
    if isinstance(action, Update):
        ranks = range(schedule.stages) if schedule.reduction_across_ranks else (rank,)
        return tuple((other, Reduce.kind, action.chunk, action.batch) for other in ranks)
    received = previous_stage(schedule, rank, action)
    needed = () if received is None else (received,)
    if isinstance(action, Backward):
        return (*needed, (rank, Forward.kind, action.chunk, action.microbatch))
    return needed


def execute(schedule: Schedule) -> tuple[list[tuple[int, int]], dict[int, tuple[int, Key]]]:
    """Run the table without times: each rank advances until a predecessor is missing.

    Returns:
        (rank, step) of every action that could run, in an order that respects all dependencies; and for each blocked
        rank its step and the missing action.
    """
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
    return order, blocked
