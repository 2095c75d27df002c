# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Cut a row of blocks into stages so that the slowest is fastest: exact dynamic programs, the standard library alone.

The row is the embedding, every layer, and the head with the loss. A part is a slice of it. The first part has a layer
beside the embedding, no part is empty, the last one may be the head alone.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, islice, pairwise

Cost = Callable[[int, int, int], float]
"""Cost of blocks [start, end) as a part: (part, start, end) -> cost; it grows with every block."""
Fits = Callable[[int, int, int], bool]
"""Whether blocks [start, end) fit as a part; part of one that fits fits too."""
Ends = tuple[int, ...]
"""End of each part."""

ARGUMENTS = (
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Arguments that split the layers, beside the pattern of a HybridModel."""
_NEARLY = 1 + 1e-9
_MIDDLES, _KEPT = 8, 4
"""Places of the middle, and ends of a rank's second part, that are followed up."""


def anywhere(part: int, start: int, end: int) -> bool:
    """No limit of what fits."""
    return True


def cut(blocks: int, parts: int, cost: Cost, fits: Fits = anywhere) -> Ends | None:
    """The split whose most expensive part is cheapest and, among equal ones, whose parts differ least.

    Returns:
        None where no split fits.
    """
    least, _ = _program(blocks, parts, cost, fits, max, math.inf)
    if least == math.inf:
        return None
    _, ends = _program(blocks, parts, cost, fits, lambda before, own: before + own * own, least * _NEARLY)
    return ends


def most_even(times: Sequence[float], stages: int, parts: int = 1) -> tuple[float, Ends] | None:
    """The split whose slowest rank is fastest, after the time of that rank; None if there are too few blocks.

    Args:
        times: of each block.
        parts: of each rank, 1 or 2.
    """
    splits = [cut(len(times), stages, sums_of(times))] if parts == 1 else cut_pairs(times, stages)
    weighed = [(max(sum(map(sum, own)) for own in on_ranks(times, ends, stages)), ends) for ends in splits if ends]
    return min(weighed, default=None)


def sums_of(times: Sequence[float]) -> Cost:
    """The cost of a part that is the sum of the times of its blocks."""
    sums = list(accumulate(times, initial=0.0))
    return lambda part, start, end: sums[end] - sums[start]


def _program(
    blocks: int, parts: int, cost: Cost, fits: Fits, combine: Callable[[float, float], float], limit: float
) -> tuple[float, Ends]:
    """Least combined cost of all parts, none above the limit, and the split that has it."""
    best = [0.0, *[math.inf] * blocks]
    choices: list[list[int]] = []
    for part in range(parts):
        now, chosen = [math.inf] * (blocks + 1), [0] * (blocks + 1)
        first = 2 if part == 0 and blocks > 1 else part + 1
        for end in range(first, blocks - (parts - 1 - part) + 1):
            for start in range(end - 1 if part else 0, part - 1, -1):
                own = cost(part, start, end)
                if own > limit or combine(0.0, own) >= now[end] or not fits(part, start, end):
                    break
                if (value := combine(best[start], own)) < now[end]:
                    now[end], chosen[end] = value, start
                if part == 0:
                    break
        best = now
        choices.append(chosen)
    ends = [blocks]
    for chosen in reversed(choices[1:]):
        ends.append(chosen[ends[-1]])
    return best[blocks], tuple(reversed(ends))


def cut_pairs(times: Sequence[float], stages: int) -> Iterator[Ends]:
    """Splits into 2 x stages parts for ranks that hold parts i and stages + i. Only a simulation can weigh them.

    For each place of the middle near half of the time: the split whose slowest rank is fastest, and the one whose
    halves are each as even as can be.
    """
    sums = list(accumulate(times, initial=0.0))
    middles = range(stages + 1, len(times) - stages + 1)
    for middle in sorted(middles, key=lambda place: abs(2 * sums[place] - sums[-1]))[:_MIDDLES]:
        if (ends := _best_pairs(sums, stages, middle)) is not None:
            yield ends
        first = cut(middle, stages, sums_of(times))
        second = cut(len(times) - middle + 1, stages, _behind(sums, middle))
        if first is not None and second is not None:
            yield (*first, *(middle + end - 1 for end in second))


def _behind(sums: Sequence[float], middle: int) -> Cost:
    """Cost of the blocks behind the middle; `cut` gives its first part two blocks, so the first one is free."""
    return lambda part, start, end: sums[middle + end - 1] - sums[middle + max(0, start - 1)]


def _best_pairs(sums: Sequence[float], stages: int, middle: int) -> Ends | None:
    low, high = sums[-1] / stages, sums[-1]
    best = _pairs(sums, stages, middle, high)
    while best is not None and high - low > 1e-4 * low:
        limit = (low + high) / 2
        found = _pairs(sums, stages, middle, limit)
        if found is None:
            low = limit
        else:
            best, high = found, limit
    return best


def _pairs(sums: Sequence[float], stages: int, middle: int, limit: float) -> Ends | None:
    """A split with no rank above the limit, if there is one."""
    blocks, bound = len(sums) - 1, limit * _NEARLY
    # For every rank: end of its part in the first half -> ends that its part in the second half can have.
    reached: list[dict[int, set[int]]] = [{0: {middle}}]
    for rank in range(stages):
        left = stages - 1 - rank
        now: dict[int, set[int]] = {}
        for start, others in reached[-1].items():
            for end in range(start + (2 if rank == 0 else 1), middle - left + 1):
                rest = bound - (sums[end] - sums[start])
                if rest <= 0:
                    break
                for other in others:
                    far = min(bisect_right(sums, sums[other] + rest) - 1, blocks - left)
                    now.setdefault(end, set()).update(range(max(other, far - _KEPT) + 1, far + 1))
        # The furthest ends leave the least to the other ranks.
        reached.append({end: set(sorted(others)[-_KEPT:]) for end, others in now.items()})
    if blocks not in reached[-1].get(middle, ()):
        return None
    ends, row = (middle, blocks), [(middle, blocks)]
    for before in reversed(reached[1:-1]):
        ends = next(
            (start, other)
            for start, others in before.items()
            for other in others
            if start < ends[0]
            and other < ends[1]
            and sums[ends[0]] - sums[start] + sums[ends[1]] - sums[other] <= bound
        )
        row.append(ends)
    return (*(first for first, _ in reversed(row)), *(second for _, second in reversed(row)))


def places(ends: Ends) -> list[tuple[int, int]]:
    """Start and end of each part."""
    return list(pairwise((0, *ends)))


def on_ranks[T](blocks: Sequence[T], ends: Ends, stages: int) -> list[list[Sequence[T]]]:
    """Blocks of each part of each rank, which holds the parts rank, stages + rank, and so on."""
    parts = [blocks[start:end] for start, end in places(ends)]
    return [parts[rank::stages] for rank in range(stages)]


def option(ends: Ends, letters: str | None) -> tuple[str, str]:
    """A split as option and value: a layout (Et*8|t*8|t*8|L), or the pattern of a HybridModel with these letters."""
    counts = [end - start for start, end in places(ends)]
    counts[0] -= 1
    counts[-1] -= 1
    if letters is not None:
        layers = iter(letters)
        return "--hybrid-layer-pattern", "|".join("".join(islice(layers, count)) for count in counts)
    parts = ["" if count == 0 else "t" if count == 1 else f"t*{count}" for count in counts]
    parts[0], parts[-1] = f"E{parts[0]}", f"{parts[-1]}L"
    return "--pipeline-model-parallel-layout", "|".join(parts)
