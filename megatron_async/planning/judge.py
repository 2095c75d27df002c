# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The fastest splits, with the simulator as judge."""

from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from itertools import accumulate, permutations

from megatron_async.planning.split import Ends, Fits, anywhere, cut, cut_pairs, on_ranks, places, sums_of
from megatron_async.planning.timing import BlockTime, batch_seconds, period, simulator, stage_costs

SIMULATIONS = 300
"""Most simulations to improve a split for ranks that hold two parts."""


def fastest(
    schedule: str, times: Sequence[BlockTime], stages: int, microbatches: int, fits: Fits = anywhere
) -> Ends | None:
    """The split with the fastest batch of one part a stage, as `cut`.

    Stages wait for each other's updates unless these coincide. So the slowest stage is made as fast as can be with its
    update and without, and the simulator judges.
    """
    found: dict[Ends, None] = {}
    for own in ([one.of_batch(microbatches) for one in times], [one.total for one in times]):
        if (ends := cut(len(own), stages, sums_of(own), fits)) is not None:
            found[ends] = None
    return min(
        found,
        key=lambda ends: batch_seconds(schedule, stage_costs(on_ranks(times, ends, stages)), microbatches),
        default=None,
    )


@lru_cache(maxsize=256)
def pairs(schedule: str, times: tuple[float, ...], stages: int, simulations: int = SIMULATIONS) -> list[Ends]:
    """Splits for ranks that hold two parts, the fastest under the simulated schedule first.

    The best of a few is improved by moving one layer as long as that helps.
    """

    blocks = [BlockTime(own / 3, own * 2 / 3) for own in times]
    made = simulator(schedule, stages, 2 * stages)

    @cache
    def seconds(ends: Ends) -> float:
        return period(made, stage_costs(on_ranks(blocks, ends, stages)))

    ordered = sorted(set(cut_pairs(times, stages)), key=lambda ends: (seconds(ends), ends))
    if not ordered:
        return []
    best, improved, left = ordered[0], True, simulations
    while improved and left > 0:
        near = list(_neighbors(best))
        left -= len(near)
        nearest = min(near, key=seconds, default=best)
        improved = seconds(nearest) < seconds(best) * (1 - 1e-9)
        best = nearest if improved else best
    return [best, *(ends for ends in ordered if ends != best)]


def _neighbors(ends: Ends) -> Iterator[Ends]:
    """Splits with one layer moved from a part to another; the parts between them shift by one."""
    sizes = [end - start for start, end in places(ends)]
    for source, target in permutations(range(len(sizes)), 2):
        if sizes[source] > (2 if source == 0 else 1):
            moved = list(sizes)
            moved[source] -= 1
            moved[target] += 1
            yield tuple(accumulate(moved))
