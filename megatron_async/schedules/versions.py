# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Which weight versions a rank has to hold while it runs its list."""

from collections.abc import Iterator

from megatron_async.schedules.actions import Backward, Forward, Schedule, Update


def alive_versions(schedule: Schedule, rank: int, chunk: int) -> Iterator[tuple[int, frozenset[int]]]:
    """Versions alive before the first action (step -1) and after each update, as (step, versions).

    A version is alive from the update that creates it until its last use in the list; the newest one, on
    which the next update builds, always is, and so is the one that the batch after the end of the list will
    use, because a drained run goes on from there.
    """
    row = schedule.actions[rank]
    last_use = {schedule.versions[rank][chunk](schedule.update_range.stop): len(row)}
    for step in reversed(range(len(row))):
        action = row[step]
        if isinstance(action, Forward | Backward) and action.chunk == chunk:
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
    """Largest number of weight versions of a chunk that are alive at once on a rank."""
    return max(len(versions) for _, versions in alive_versions(schedule, rank, chunk))


def gradient_delay(schedule: Schedule, rank: int, chunk: int) -> int:
    """Largest age in optimizer steps of the weights that a gradient is taken at.

    Looks P batches beyond the table, so that a short one shows the delay of a run that goes on.
    """
    numbers = schedule.update_range
    rule = schedule.versions[rank][chunk]
    return max(batch - rule(batch) for batch in range(numbers.start, numbers.stop + schedule.stages))
