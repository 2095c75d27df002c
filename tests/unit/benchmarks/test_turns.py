# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The order of turns, and what is compared with what."""

import pytest

from benchmarks.cell import in_rounds
from benchmarks.contenders import LIMIT
from benchmarks.results import ratio, slowest


def rounds(names: list[str], count: int, *, each: bool) -> tuple[list[str], dict]:
    """The order of turns, each one batch of 1 ms longer than the turn before it; and what was found."""
    taken: list[str] = []

    def take(name: str) -> list[float]:
        taken.append(name)
        return [float(len(taken))]

    return taken, in_rounds(take, names, count, each=each)


def test_each_turn_is_compared_with_the_limit_right_before_it():
    taken, found = rounds(["a", "b"], 2, each=True)
    assert taken == [LIMIT, "a", LIMIT, "b"] * 2
    assert found["a"] == ([[2.0], [6.0]], [[1.0], [5.0]])
    assert found["b"] == ([[4.0], [8.0]], [[3.0], [7.0]])
    assert found[LIMIT] == ([[1.0], [3.0], [5.0], [7.0]],) * 2


def test_one_turn_of_the_limit_in_a_round_is_enough_where_time_does_not_depend_on_the_machine():
    taken, found = rounds(["a", "b"], 2, each=False)
    assert taken == [LIMIT, "a", "b"] * 2
    assert found["b"] == ([[3.0], [6.0]], [[1.0], [4.0]])


def test_a_slow_machine_in_one_of_three_rounds_changes_no_ratio():
    own, other = [[14.0, 16.0], [28.0, 32.0], [15.0, 15.0]], [[10.0, 10.0], [20.0, 20.0], [10.0, 10.0]]
    slower, faster = ([[scale * time for time in turn] for turn in own] for scale in (1.0, 0.9))
    assert ratio([slower, faster], [other, other]) == pytest.approx((1.5, 0.0))


def test_a_ratio_comes_with_the_distance_of_its_quartiles_over_turns():
    assert ratio([[[10.0], [11.0], [12.0]]], [[[10.0]] * 3]) == pytest.approx((1.1, 0.1))


def test_times_are_those_of_the_slowest_rank():
    assert slowest([[[1.0, 2.0], [3.0]], [[2.0, 4.0], [6.0]]]) == pytest.approx((4.0, 2.0))
    assert slowest([[[5.0]]]) == (5.0, 0.0)
