# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Which turns count."""

from benchmarks.contenders import LIMIT
from benchmarks.turns import Turns, between_limits, in_rounds


def timed(limits: list[float], own: list[float], *, names: str = "a", rounds: int = 1, patience: float = 99.0) -> Turns:
    """Turns that take these times one after the other; each makes the clock advance by one second."""
    times = {LIMIT: iter(limits), "contender": iter(own)}
    seconds = [0.0]

    def take(name: str) -> list[float]:
        seconds[0] += 1
        return [next(times[name if name == LIMIT else "contender"])]

    turns = between_limits(take, list(names), rounds, largest=float, patience_s=patience, clock=lambda: seconds[0])
    assert not [*times[LIMIT], *times["contender"]], "turns that were not taken"
    return turns


def test_a_turn_is_compared_with_the_limit_before_and_after_it():
    turns = timed([100.0, 102.0, 101.0], [103.0, 104.0], names="ab")
    assert turns.limits["a"] == [[100.0, 102.0]] and turns.limits["b"] == [[102.0, 101.0]]
    assert turns.own == {LIMIT: [[100.0], [102.0], [101.0]], "a": [[103.0]], "b": [[104.0]]}
    assert not turns.uneven.total()


def test_contenders_take_turns():
    assert timed([100.0] * 5, [1.0, 2.0, 3.0, 4.0], names="ab", rounds=2).own["a"] == [[1.0], [3.0]]


def test_a_turn_on_a_slowed_machine_is_repeated_once_the_machine_is_itself_again():
    turns = timed([100.0, 150.0, 149.0, 101.0, 100.0], [1.0, 2.0])
    assert turns.own["a"] == [[2.0]] and turns.limits["a"] == [[101.0, 100.0]]
    assert not turns.uneven["a"]


def test_a_machine_that_was_slow_from_the_start_is_noticed_later():
    turns = timed([150.0, 150.0, 100.0, 101.0, 100.0], [1.0, 2.0, 3.0, 4.0], names="ab")
    assert turns.own["a"] == [[3.0]] and turns.own["b"] == [[4.0]] and not turns.uneven.total()


def test_which_turns_count_does_not_depend_on_the_contender():
    """Else its slow turns could be left out."""
    assert timed([100.0, 100.0], [1000.0]).own["a"] == [[1000.0]]
    assert timed([100.0, 150.0, 100.0, 100.0], [1.0, 1000.0]).own["a"] == [[1000.0]]


def test_patience_ends_and_what_is_uneven_then_is_marked():
    turns = timed([100.0, 150.0, 151.0, 149.0, 130.0], [1.0, 2.0], patience=5.0)
    assert turns.own["a"] == [[2.0]] and turns.limits["a"] == [[149.0, 130.0]] and turns.uneven == {"a": 1}
    assert timed([100.0, 150.0, 140.0], [1.0, 2.0], names="ab", patience=0.0).uneven == {"a": 1, "b": 1}


def test_where_the_limit_is_the_same_at_any_time_one_turn_in_a_round_is_enough():
    turns = in_rounds(lambda name: [float(len(name))], ["a", "bc"], 2)
    assert turns.own == {LIMIT: [[5.0]] * 2, "a": [[1.0]] * 2, "bc": [[2.0]] * 2}
    assert turns.limits["bc"] == [[5.0], [5.0]]
