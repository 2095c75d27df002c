# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Vector clocks of a table: what each action depends on, whatever time anything takes."""

from dataclasses import dataclass
from functools import cached_property

from megatron_async.schedules import Schedule
from megatron_async.schedules.dependencies import execute, key_of, predecessors, previous_stage


@dataclass(frozen=True, slots=True)
class Passed:
    """A message between ranks: `step` of `rank` sends it, `use` of `receiver` needs it."""

    rank: int
    step: int
    receiver: int
    use: int


class Clocks:
    """The clocks of a table's actions.

    Attributes:
        before: for rank and step, how many actions of each rank that action depends on; itself counts.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.steps = {
            key_of(rank, action): (rank, step)
            for rank, row in enumerate(schedule.actions)
            for step, action in enumerate(row)
        }
        self.before: dict[tuple[int, int], list[int]] = {}
        for rank, step in execute(schedule)[0]:
            needed = [self.steps[key] for key in predecessors(schedule, rank, schedule.actions[rank][step])]
            if step:
                needed.append((rank, step - 1))
            clock = [
                max(counts) for counts in zip(*(self.before[at] for at in needed), [0] * schedule.stages, strict=True)
            ]
            clock[rank] = step + 1
            self.before[rank, step] = clock

    @cached_property
    def links(self) -> dict[tuple[int, str], list[Passed]]:
        """The messages that a rank receives of a kind, in order."""
        found: dict[tuple[int, str], list[Passed]] = {}
        for rank, row in enumerate(self._schedule.actions):
            for step, action in enumerate(row):
                source = previous_stage(self._schedule, rank, action)
                if source is not None and source[0] != rank:
                    found.setdefault((rank, action.kind), []).append(Passed(*self.steps[source], rank, step))
        return found
