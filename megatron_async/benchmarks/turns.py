# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Who is timed when. A turn is a few batches of one contender; it is compared with turns of the limit beside it."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_async.benchmarks.contenders import LIMIT

UNEVEN = 0.03
"""Largest difference of the limit's turns before and after a turn that counts, relative to the faster one."""

Take = Callable[[str], list[float]]
"""Let a contender have a turn; returns the milliseconds of every batch that counts."""


@dataclass(slots=True)
class Turns:
    """Milliseconds of batches, by contender and turn.

    Attributes:
        own: the contender's.
        limits: those of the limit that they are compared with.
        uneven: how many of a contender's turns lie between turns of the limit that differ by more than `UNEVEN`.
    """

    own: dict[str, list[list[float]]] = field(default_factory=dict)
    limits: dict[str, list[list[float]]] = field(default_factory=dict)
    uneven: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, own: list[float], limit: list[float]) -> None:
        self.own.setdefault(name, []).append(own)
        self.limits.setdefault(name, []).append(limit)


def in_rounds(take: Take, names: Sequence[str], rounds: int) -> Turns:
    """One turn of each contender in a round, the limit's first: where the limit is the same at any time.

    Args:
        take: gives a turn.
        names: contenders beside the limit.
        rounds: turns of each.
    """
    turns = Turns()
    for _ in range(rounds):
        alone = take(LIMIT)
        turns.add(LIMIT, alone, alone)
        for name in names:
            turns.add(name, take(name), alone)
    return turns


def between_limits(take: Take, names: Sequence[str], rounds: int, *, slowest: Callable[[list[float]], float]) -> Turns:
    """Turns between two turns of the limit: where the machine is slower for seconds and for minutes.

    A turn between unequal turns of the limit is repeated, whatever its own time, at most as often in all as there are
    contenders.

    Args:
        take: gives a turn.
        names: contenders beside the limit.
        rounds: turns of each.
        slowest: median of a turn on the slowest rank; collective, so that all ranks repeat the same turns.
    """
    turns, repeats = Turns(), len(names)
    before = take(LIMIT)
    turns.add(LIMIT, before, before)
    for _ in range(rounds):
        for name in names:
            while True:
                own, after = take(name), take(LIMIT)
                turns.add(LIMIT, after, after)
                times = slowest(before), slowest(after)
                uneven = max(times) > (1 + UNEVEN) * min(times)
                around, before = before + after, after
                if not uneven or not repeats:
                    break
                repeats -= 1
            turns.add(name, own, around)
            turns.uneven[name] += uneven
    return turns
