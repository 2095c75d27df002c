# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Weight versions that a rank holds while it runs its actions."""

from collections.abc import Iterator

from megatron_async.schedules.actions import Compute, Schedule, Update


def alive_versions(schedule: Schedule, rank: int, chunk: int) -> Iterator[tuple[int, frozenset[int]]]:
    """Versions alive before the first action (step -1) and after each update, as (step, versions).

    A version is alive from its update to its last use. The newest version is always alive, and so is the version of
    the batch after the table: a drained run continues with it.
    """
    row = schedule.actions[rank]
    last_use = {schedule.versions[rank][chunk](schedule.update_range.stop): len(row)}
    for step in reversed(range(len(row))):
        action = row[step]
        if isinstance(action, Compute) and action.chunk == chunk:
            last_use.setdefault(action.version, step)
    newest = schedule.update_range.start
    alive = {version for version in last_use if version < newest} | {newest}
    yield -1, frozenset(alive)
    for step, action in enumerate(row):
        if isinstance(action, Update) and action.chunk == chunk:
            newest = action.batch + 1
            alive = {version for version in alive if last_use.get(version, -1) > step} | {newest}
            yield step, frozenset(alive)


def peak_versions(schedule: Schedule, rank: int, chunk: int) -> int:
    """Most weight versions of a chunk that are alive at once."""
    return max(len(versions) for _, versions in alive_versions(schedule, rank, chunk))


def gradient_delay(schedule: Schedule, rank: int, chunk: int) -> int:
    """Largest delay of a gradient, in optimizer steps, up to P batches after the table: short tables show it too."""
    numbers, rule = schedule.update_range, schedule.versions[rank][chunk]
    return max(batch - rule(batch) for batch in range(numbers.start, numbers.stop + schedule.stages))
