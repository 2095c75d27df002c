# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Splits of layers over stages: complete, in order, never empty, within the memory, and as fast as the best of all."""

import itertools
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async.planning.split import Ends, cut, cut_pairs, most_even, option

TIMES = st.lists(st.floats(0.1, 10.0), min_size=4, max_size=10)
"""Of the layers and the head; the embedding takes none."""


def rows(ends: Ends) -> list[tuple[int, int]]:
    return list(zip((0, *ends), ends, strict=False))


def layout(ends: Ends) -> str:
    return option(ends, None)[1]


def every_split(blocks: int, parts: int) -> Iterator[Ends]:
    for inner in itertools.combinations(range(2, blocks), parts - 1):
        yield (*inner, blocks)


def check(ends: Ends, blocks: int, parts: int) -> None:
    """Every block once, in order; a layer on the first part; no empty part."""
    assert len(ends) == parts and ends[-1] == blocks
    assert ends[0] >= 2 and all(start < end for start, end in rows(ends))
    words = layout(ends).split("|")
    counts = [int(word.strip("EL").removeprefix("t*")) if "*" in word else word.count("t") for word in words]
    assert sum(counts) == blocks - 2 and words[0].startswith("E") and words[-1].endswith("L")
    letters = "".join(itertools.islice(itertools.cycle("M-*E"), blocks - 2))
    name, pattern = option(ends, letters)
    assert name == "--hybrid-layer-pattern" and pattern.replace("|", "") == letters
    assert list(map(len, pattern.split("|"))) == counts


@settings(max_examples=150, deadline=None)
@given(TIMES, st.integers(2, 5))
def test_the_slowest_part_is_as_fast_as_in_the_best_of_all_splits(layers: list[float], parts: int) -> None:
    times = [0.0, *layers]
    found = most_even(times, parts)
    possible = list(every_split(len(times), parts))
    assert (found is None) == (not possible)
    if found is not None:
        check(found[1], len(times), parts)
        slowest = [max(sum(times[slice(*row)]) for row in rows(split)) for split in (found[1], *possible)]
        assert found[0] == slowest[0] <= min(slowest[1:]) * (1 + 1e-6)


@settings(max_examples=150, deadline=None)
@given(TIMES, st.integers(2, 4), st.floats(0.3, 1.0), st.lists(st.floats(0.5, 2.0), min_size=11, max_size=11))
def test_the_memory_is_kept_where_any_split_keeps_it(
    layers: list[float], parts: int, share: float, sizes: list[float]
) -> None:
    times, sizes = [0.0, *layers], sizes[: len(layers) + 1]
    limit = share * sum(sizes)

    def held(part: int, start: int, end: int) -> float:
        return (parts - part) / parts * sum(sizes[start:end])  # earlier stages keep more micro-batches

    def fits(part: int, start: int, end: int) -> bool:
        return held(part, start, end) <= limit

    ends = cut(len(times), parts, lambda part, start, end: sum(times[start:end]), fits)
    fitting = [
        split
        for split in every_split(len(times), parts)
        if all(fits(part, *row) for part, row in enumerate(rows(split)))
    ]
    assert (ends is None) == (not fitting)
    if ends is not None:
        assert all(fits(part, *row) for part, row in enumerate(rows(ends)))
        best = min(max(sum(times[slice(*row)]) for row in rows(split)) for split in fitting)
        assert max(sum(times[slice(*row)]) for row in rows(ends)) <= best * (1 + 1e-6)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.1, 10.0), min_size=5, max_size=10), st.integers(2, 3))
def test_pairs_of_parts_are_complete_and_hold_the_best_for_their_middle(layers: list[float], stages: int) -> None:
    times = [0.0, *layers]
    found = list(cut_pairs(times, stages))
    for ends in found:
        check(ends, len(times), 2 * stages)

    def slowest(ends: Ends) -> float:
        parts = [sum(times[slice(*row)]) for row in rows(ends)]
        return max(parts[rank] + parts[stages + rank] for rank in range(stages))

    for middle in {ends[stages - 1] for ends in found}:
        every = [own for own in every_split(len(times), 2 * stages) if own[stages - 1] == middle]
        own = min(slowest(ends) for ends in found if ends[stages - 1] == middle)
        assert own <= min(map(slowest, every)) * 1.001


def test_among_equal_splits_the_parts_differ_least() -> None:
    sums = list(itertools.accumulate([0.0, *[1.0] * 8, 5.0], initial=0.0))
    ends = cut(10, 3, lambda part, start, end: sums[end] - sums[start])
    assert ends is not None and layout(ends) == "Et*4|t*4|L"


def test_more_parts_than_layers_have_no_split() -> None:
    assert cut(4, 4, lambda part, start, end: 1.0) is None
    assert layout((3, 5)) == "Et*2|tL" and layout((6, 7)) == "Et*5|L"
