# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Every rule of the validator, broken on purpose in an otherwise valid table."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from megatron_async.schedules import (
    Action,
    Backward,
    Forward,
    Reduce,
    Schedule,
    ScheduleError,
    Update,
    make_schedule,
    validate,
)

Row = list[Action]


def edited(schedule: Schedule, rank: int, edit: Callable[[Row], object]) -> Schedule:
    """The schedule with one rank's list changed."""
    rows = [list(row) for row in schedule.actions]
    edit(rows[rank])
    return replace(schedule, actions=tuple(map(tuple, rows)))


def move(row: Row, action: Action, before: Action) -> None:
    """Take an action out of the list and put it in again before another one."""
    row.remove(action)
    row.insert(row.index(before), action)


def swap(row: Row, one: Action, other: Action) -> None:
    """Exchange two actions of a list."""
    i, j = row.index(one), row.index(other)
    row[i], row[j] = other, one


def broken(schedule: Schedule) -> ScheduleError:
    """The error of an invalid table; checks what every message must contain."""
    with pytest.raises(ScheduleError) as caught:
        validate(schedule)
    error = caught.value
    message = str(error)
    assert f"'{error.rule}' on rank {error.rank}, step {error.step}" in message
    marked = [line for line in message.splitlines() if line.endswith("<-- HERE")]
    assert len(marked) == 1
    assert marked[0].split()[0] == str(error.step)
    return error


@pytest.fixture
def two_bw() -> Schedule:
    return make_schedule("2bw", 2, 2, 4)


def test_untouched_table_is_valid(two_bw) -> None:
    validate(two_bw)


@pytest.mark.parametrize(
    "action", [Forward(0, 3, 0), Backward(0, 3, 0), Reduce(0, 1), Update(0, 1)], ids=["F", "B", "R", "U"]
)
def test_missing_action(two_bw, action) -> None:
    error = broken(edited(two_bw, 1, lambda row: row.remove(action)))
    assert (error.rule, error.rank, error.step) == ("each action exactly once", 1, len(two_bw.actions[1]) - 1)
    assert "is missing" in str(error)


@pytest.mark.parametrize(
    "action", [Forward(0, 3, 0), Backward(0, 3, 0), Reduce(0, 1), Update(0, 1)], ids=["F", "B", "R", "U"]
)
def test_repeated_action(two_bw, action) -> None:
    error = broken(edited(two_bw, 0, lambda row: row.append(action)))
    assert (error.rule, error.rank, error.step) == ("each action exactly once", 0, len(two_bw.actions[0]))
    assert f"is already at step {two_bw.actions[0].index(action)}" in str(error)


@pytest.mark.parametrize("action", [Forward(0, 8, 3), Forward(1, 0, 0), Update(0, 4)], ids=str)
def test_action_outside_the_table(two_bw, action) -> None:
    error = broken(edited(two_bw, 0, lambda row: row.insert(0, action)))
    assert (error.rule, error.step) == ("each action exactly once", 0)
    assert "not in a table of 1 chunks" in str(error)


def test_backward_before_forward(two_bw) -> None:
    error = broken(edited(two_bw, 1, lambda row: swap(row, Forward(0, 1, 0), Backward(0, 1, 0))))
    assert (error.rule, error.rank) == ("forward before backward", 1)
    assert "micro-batch 1" in str(error)


def test_backward_with_another_version(two_bw) -> None:
    def edit(row: Row) -> None:
        row[row.index(Backward(0, 4, 1))] = Backward(0, 4, 2)

    error = broken(edited(two_bw, 0, edit))
    assert error.rule == "same version forward and backward"
    assert "micro-batch 4 went forward with version 1" in str(error)


def test_other_version_than_the_rule_says(two_bw) -> None:
    def edit(row: Row) -> None:
        row[row.index(Forward(0, 4, 1))] = Forward(0, 4, 0)
        row[row.index(Backward(0, 4, 1))] = Backward(0, 4, 0)

    error = broken(edited(two_bw, 0, edit))
    assert error.rule == "version of the rule"
    assert "micro-batch 4 of batch 2 must use version 1, not 0" in str(error)


def test_reduction_before_the_last_backward(two_bw) -> None:
    error = broken(edited(two_bw, 0, lambda row: swap(row, Reduce(0, 1), Backward(0, 3, 0))))
    assert error.rule == "reduce after the last backward"
    assert "the backward of micro-batch 3 comes later" in str(error)


def test_update_before_its_reduction(two_bw) -> None:
    error = broken(edited(two_bw, 0, lambda row: move(row, Update(0, 2), before=Reduce(0, 2))))
    assert error.rule == "update after its reduction"
    assert "reduction of batch 2" in str(error)


def test_reductions_out_of_order(two_bw) -> None:
    error = broken(edited(two_bw, 0, lambda row: move(row, Reduce(0, 2), before=Update(0, 2))))
    assert error.rule == "batches in order"
    assert "the reduction of batch 2 comes later" in str(error)


def test_updates_out_of_order(two_bw) -> None:
    error = broken(edited(two_bw, 0, lambda row: swap(row, Update(0, 2), Update(0, 3))))
    assert error.rule == "batches in order"
    assert "the update of batch 2 comes later" in str(error)


def test_more_versions_than_allowed(two_bw) -> None:
    error = broken(replace(two_bw, version_limits=((2,), (1,))))
    assert (error.rule, error.rank) == ("number of versions alive", 1)
    assert "at most 1 may be alive" in str(error)


def test_second_version_of_the_fresh_chunk() -> None:
    """An update of chunk 1 that does not wait for the end of its own batch's successor would need a copy."""
    schedule = make_schedule("wpipe", 2, 2, 3)
    rules = tuple((delayed, lambda batch: max(batch - 1, 0)) for delayed, _ in schedule.versions)

    def stale(action: Action) -> Action:
        if isinstance(action, Forward | Backward) and action.chunk == 1:
            return replace(action, version=max(action.microbatch // 2 - 1, 0))
        return action

    rows = tuple(tuple(map(stale, row)) for row in schedule.actions)
    error = broken(replace(schedule, actions=rows, versions=rules))
    assert error.rule == "number of versions alive"
    assert "of chunk 1" in str(error)


def test_update_that_comes_after_a_forward_which_needs_it(two_bw) -> None:
    error = broken(edited(two_bw, 1, lambda row: swap(row, Update(0, 0), Forward(0, 4, 1))))
    assert (error.rule, error.rank) == ("version created before its use", 1)
    assert "micro-batch 4 uses version 1, but version 0 is the newest here" in str(error)


def test_version_that_a_newer_one_has_replaced() -> None:
    """Only versions 0 and 2 are needed when version 2 appears, but it takes the place of version 0."""
    versions = {0: 0, 1: 0, 2: 0, 3: 2}
    schedule = make_schedule("2bw", 1, 1, 3, versions=lambda batch: versions[batch])
    error = broken(edited(schedule, 0, lambda row: move(row, Update(0, 1), before=Forward(0, 2, 0))))
    assert error.rule == "version not retired before its use"
    assert "micro-batch 2 uses version 0, which version 2 has replaced" in str(error)


def test_neighbors_that_disagree_on_the_order(two_bw) -> None:
    error = broken(edited(two_bw, 0, lambda row: swap(row, Forward(0, 0, 0), Forward(0, 1, 0))))
    assert (error.rule, error.rank) == ("same order of sends and receives", 1)
    assert "forward of micro-batch 0 of chunk 0 from rank 0" in str(error)


def test_deadlock() -> None:
    """Rank 1 wants one forward too many before the backward that rank 0 needs to go on."""

    def edit(row: Row) -> None:
        move(row, Forward(0, 2, 0), before=Backward(0, 0, 0))
        move(row, Forward(0, 3, 0), before=Backward(0, 0, 0))

    error = broken(edited(make_schedule("2bw", 3, 3, 2), 1, edit))
    assert (error.rule, error.rank) == ("no deadlock", 0)
    assert "rank 0 waits at B0.0@v0 for the backward of micro-batch 0 of chunk 0 on rank 1" in str(error)
    assert "rank 1 waits at F0.3@v0 for the forward of micro-batch 3 of chunk 0 on rank 0" in str(error)


def test_long_tables_are_cut_around_the_row() -> None:
    schedule = edited(
        make_schedule("1f1b", 2, 4, 50), 1, lambda row: swap(row, Forward(0, 100, 25), Backward(0, 100, 25))
    )
    message = str(broken(schedule))
    assert "earlier steps" in message
    assert "later steps" in message
    assert len(message.splitlines()) < 25
