# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Which turns count."""

import statistics
from collections.abc import Iterator

from megatron_async.benchmarks.contenders import LIMIT
from megatron_async.benchmarks.turns import Turns, between_limits, in_rounds


def timed(limits: list[float], contender: float = 103.0, names: tuple[str, ...] = ("a",), rounds: int = 1) -> Turns:
    """Turns whose limits take these times one after the other."""
    left: Iterator[float] = iter(limits)
    return between_limits(
        lambda name: [next(left)] if name == LIMIT else [contender], names, rounds, slowest=statistics.median
    )


def test_a_turn_is_compared_with_the_limit_before_and_after_it():
    turns = timed([100.0, 102.0, 101.0], names=("a", "b"))
    assert turns.limits["a"] == [[100.0, 102.0]] and turns.limits["b"] == [[102.0, 101.0]]
    assert turns.own == {LIMIT: [[100.0], [102.0], [101.0]], "a": [[103.0]], "b": [[103.0]]}
    assert not turns.uneven.total()


def test_a_turn_on_an_uneven_machine_is_repeated():
    turns = timed([100.0, 150.0, 149.0])
    assert turns.limits["a"] == [[150.0, 149.0]] and turns.own["a"] == [[103.0]]
    assert not turns.uneven["a"]


def test_repeats_do_not_depend_on_the_contender():
    """Else slow turns of a contender could be left out."""
    assert timed([100.0, 100.0], contender=1000.0).own["a"] == [[1000.0]]
    assert timed([100.0, 150.0, 150.0], contender=1.0).own["a"] == [[1.0]]


def test_repeats_end_and_what_is_uneven_then_is_marked():
    turns = timed([100.0, 150.0, 100.0, 150.0, 100.0, 100.0], names=("a", "b"), rounds=1)
    assert turns.uneven == {"a": 1, "b": 1} and turns.limits["b"] == [[150.0, 100.0]]


def test_where_the_limit_is_the_same_at_any_time_one_turn_in_a_round_is_enough():
    turns = in_rounds(lambda name: [float(len(name))], ["a", "bc"], 2)
    assert turns.own == {LIMIT: [[5.0]] * 2, "a": [[1.0]] * 2, "bc": [[2.0]] * 2}
    assert turns.limits["bc"] == [[5.0], [5.0]]
