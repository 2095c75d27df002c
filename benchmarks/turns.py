# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Who is timed when. A turn is a few batches of one contender; it is compared with turns of the limit beside it."""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.contenders import LIMIT

EVEN = 1.03
"""So many times the limit's fastest turn its turns before and after a turn may take for that to count."""

Take = Callable[[str], list[float]]
"""Let a contender have a turn; returns the milliseconds of every batch that counts."""


@dataclass(slots=True)
class Turns:
    """Milliseconds of batches, by contender and turn.

    Attributes:
        own: the contender's.
        limits: those of the limit that they are compared with.
        uneven: how many of a contender's turns lie beside a turn of the limit that is slower than `EVEN` allows.
    """

    own: dict[str, list[list[float]]] = field(default_factory=dict)
    limits: dict[str, list[list[float]]] = field(default_factory=dict)
    uneven: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, own: list[float], limit: list[float]) -> None:
        self.own.setdefault(name, []).append(own)
        self.limits.setdefault(name, []).append(limit)


def ratio(own: Sequence[Sequence[Sequence[float]]], other: Sequence[Sequence[Sequence[float]]]) -> float:
    """How many times the other's time one takes, from the batches of every rank, turn by turn.

    The median over turns of the quotient of medians, each on its slowest rank: what slows the machine for longer than
    that slows both.
    """

    def slowest(ranks: Sequence[Sequence[Sequence[float]]]) -> list[float]:
        return [max(map(statistics.median, turns)) for turns in zip(*ranks, strict=True)]

    return statistics.median(time / base for time, base in zip(slowest(own), slowest(other), strict=True))


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


@dataclass(frozen=True, slots=True)
class _Turn:
    """A contender's turn, the limit's batches around it, and the slower of the limit's two turns."""

    own: list[float]
    around: list[float]
    witness: float


def between_limits(
    take: Take,
    names: Sequence[str],
    rounds: int,
    *,
    largest: Callable[[float], float],
    patience_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> Turns:
    """Turns between two turns of the limit: where the machine is slower for seconds and for minutes.

    The limit tells whether the machine is at its full speed; a contender's own time is not looked at. After the first
    rounds, contenders that lack turns at full speed have more of them. In the end all turns at full speed count, and
    where those are too few, the ones beside which the limit was fastest.

    Args:
        take: gives a turn.
        names: contenders beside the limit.
        rounds: turns of each that count at least.
        largest: over all ranks; collective, so that all take the same turns.
        patience_s: after so many seconds the machine is taken as it is.
        clock: in seconds.
    """
    start, turns = clock(), Turns()
    taken: dict[str, list[_Turn]] = {name: [] for name in names}
    times: list[float] = []

    def limit() -> list[float]:
        alone = take(LIMIT)
        turns.add(LIMIT, alone, alone)
        times.append(largest(statistics.median(alone)))
        return alone

    def even(witness: float) -> bool:
        return witness <= EVEN * min(times)

    def patient() -> bool:
        return largest(clock() - start) < patience_s

    before, due = limit(), list(names) * rounds
    while due:
        for name in due:
            while not even(times[-1]) and patient():
                before = limit()
            witness, own, after = times[-1], take(name), limit()
            taken[name].append(_Turn(own, before + after, max(witness, times[-1])))
            before = after
        lacking = [name for name in names if sum(even(turn.witness) for turn in taken[name]) < rounds]
        due = lacking if patient() else []
    for name in names:
        ranked = sorted(taken[name], key=lambda turn: turn.witness)
        counts = max(rounds, sum(even(turn.witness) for turn in ranked))
        for turn in ranked[:counts]:
            turns.add(name, turn.own, turn.around)
            turns.uneven[name] += not even(turn.witness)
    return turns
