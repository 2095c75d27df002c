# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Which rank is named as silent, the table, and the entries in a store. Silence is imitated by times."""

import io
from dataclasses import replace

import pytest
import torch.distributed as dist
from rich.console import Console

from megatron_async import platform

platform.activate("cpu")

from megatron_async.training.last_actions import Board, Entry, by_suspicion, table  # noqa: E402


def entry(rank, action, began, *, done=False, published=100.0):
    return Entry(rank, f"host-{rank}", action, 3, began, done, published)


@pytest.mark.parametrize(
    ("entries", "silent"),
    [
        # A forward that does not end; the others wait for their input, one of them for longer.
        ([entry(0, "B", 50.0, done=True), entry(1, "F", 51.0), entry(2, "F", 52.0, done=True)], 1),
        # An update waits for reductions of the others.
        ([entry(0, "U", 50.0), entry(1, "B", 51.0)], 1),
        # The oldest of two backwards.
        ([entry(0, "B", 52.0), entry(1, "B", 51.0)], 1),
        # A process that was stopped no longer writes, whatever its last action.
        ([entry(0, "F", 50.0), entry(1, "F", 60.0, done=True, published=62.0)], 1),
        # A process that wrote a second ago is not silent.
        ([entry(0, "F", 50.0, published=99.0), entry(1, "F", 60.0)], 0),
    ],
)
def test_the_silent_rank(entries, silent):
    assert by_suspicion(entries)[0].rank == silent
    assert by_suspicion(entries[::-1])[0].rank == silent


def shown(entries):
    text = io.StringIO()
    Console(file=text, width=140).print(table(entries, "title"))
    return text.getvalue()


def test_the_table_tells_what_each_rank_did_and_since_when():
    lines = shown([entry(0, "B", 87.5, done=True), entry(1, "F", 90.0, published=91.0)]).splitlines()
    (first,) = [line for line in lines if "host-1" in line]
    (second,) = [line for line in lines if "host-0" in line]
    assert lines.index(first) < lines.index(second)
    assert "F of batch 3" in first and "10.0" in first and "silent for 9 s" in first
    assert "after B of batch 3" in second and "12.5" in second and "answers" in second


def test_a_large_job_shows_the_first_rows_and_counts_the_rest():
    text = shown([entry(rank, "F", float(rank)) for rank in range(100)])
    assert "host-15 " in text and "host-16 " not in text and "and 84 more ranks" in text


def test_entries_pass_through_the_store_and_ranks_that_never_began_are_left_out():
    store = dist.HashStore()
    boards = [Board(store, 3) for _ in range(3)]
    assert boards[0].read() == []
    for rank in (0, 2):
        boards[rank].publish(entry(rank, "F", 1.0))
        boards[rank].publish(entry(rank, "U", 2.0))
    assert [replace(found, published=100.0) for found in boards[1].read()] == [entry(0, "U", 2.0), entry(2, "U", 2.0)]
    boards[1].publish(entry(1, "B", 3.0))
    assert [found.rank for found in boards[0].read()] == [0, 1, 2]


def test_one_rank_is_the_first_on_each_occasion():
    store = dist.HashStore()
    boards = [Board(store, 2) for _ in range(2)]
    assert [boards[0].is_first("failed"), boards[1].is_first("failed"), boards[0].is_first("failed")] == [
        True,
        False,
        False,
    ]
    assert boards[1].is_first("stalled/4")
