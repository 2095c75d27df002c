# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The order of measurement and its statistics. A turn is a few batches of one contender."""

import statistics
from collections.abc import Callable, Sequence

from benchmarks.contenders import LIMIT

Turns = Sequence[Sequence[float]]
"""Milliseconds by turn and batch."""


def in_rounds(
    take: Callable[[str], list[float]], names: Sequence[str], rounds: int, *, each: bool
) -> dict[str, tuple[list[list[float]], list[list[float]]]]:
    """Give turns to contenders, round after round.

    Args:
        take: gives a contender a turn; returns the milliseconds of its batches.
        names: contenders without the limit.
        rounds: turns of each.
        each: whether the limit has a turn before each contender, for a machine whose speed changes, or once a round.

    Returns:
        For each contender, the limit included, its turns and the limit's turns before them.
    """
    found: dict[str, tuple[list[list[float]], list[list[float]]]] = {name: ([], []) for name in (LIMIT, *names)}
    alone: list[float] = []
    for _ in range(rounds):
        for index, name in enumerate(names):
            if each or index == 0:
                alone = take(LIMIT)
                for turns in found[LIMIT]:
                    turns.append(alone)
            own, beside = found[name]
            own.append(take(name))
            beside.append(alone)
    return found


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Median, and distance between the quartiles; 0 for a single value."""
    if len(values) == 1:
        return values[0], 0.0
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return median, upper - lower


def slowest(ranks: Sequence[Turns]) -> tuple[float, float]:
    """Median and distance of the quartiles of all batches, on the slowest rank."""
    return max(spread([batch for turn in turns for batch in turn]) for turns in ranks)


def ratio(own: Sequence[Turns], other: Sequence[Turns]) -> tuple[float, float]:
    """Ratio of batch times: median over turns, and distance of the quartiles.

    Args:
        own, other: by rank. Turns of the same number follow each other in time, so a slow machine slows both.
    """

    def medians(ranks: Sequence[Turns]) -> list[float]:
        return [max(map(statistics.median, turns)) for turns in zip(*ranks, strict=True)]

    return spread([time / base for time, base in zip(medians(own), medians(other), strict=True)])
