# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Where receives are posted, no synchronization of a device can hang a run: proven from the tables.

A rank that synchronizes its device waits for every receive that it has posted and for every send that it has launched.
"""

from collections.abc import Callable
from graphlib import TopologicalSorter
from itertools import product

import pytest

from megatron_async.schedules import SCHEDULES, Backward, Forward, Schedule, make_schedule
from megatron_async.schedules.dependencies import predecessors
from tests.unit.schedules.clocks import Clocks, Passed

DELAYED = [name for name, definition in SCHEDULES.items() if definition.delayed]
Rule = Callable[[Schedule, list[Passed], int], int]
"""Table, messages of a link, number of one -> the step before which its receive is posted."""


def comes_round(schedule: Schedule, message: Passed) -> bool:
    return (
        schedule.chunks > 1
        and abs(message.rank - message.receiver) == schedule.stages - 1
        and (isinstance(schedule.actions[message.receiver][message.use], Forward) == (message.receiver == 0))
    )


def posted(schedule: Schedule, link: list[Passed], number: int) -> int:
    """As in `pipeline/links.py`."""
    message = link[number]
    if not comes_round(schedule, message):
        ahead = number > 0 and SCHEDULES[schedule.name].posts_ahead(schedule.stages)
        return link[number - 1].use if ahead else message.use
    for step, action in enumerate(schedule.actions[message.receiver][: message.use]):
        if isinstance(action, Forward | Backward) and action.due > number:
            return step
    return message.use


def posted_in_the_first_batch(schedule: Schedule, link: list[Passed], number: int) -> int:
    message = link[number]
    return posted(schedule, link, number) if comes_round(schedule, message) else message.use


def one_ahead(schedule: Schedule, link: list[Passed], number: int) -> int:
    """The fault of old."""
    return link[max(number - 1, 0)].use


def hangs(schedule: Schedule, rule: Rule) -> list[str]:
    """Messages with which a synchronization of one rank can hang."""
    clocks, found = Clocks(schedule), []
    for link in clocks.links.values():
        for number, message in enumerate(link):
            at, rank, receiver = rule(schedule, link, number), message.rank, message.receiver
            text = f"{schedule.actions[receiver][message.use]} of rank {receiver}"
            # The receiver synchronizes under the receive: the send must not need what comes after.
            if clocks.before[rank, message.step][receiver] > at:
                found.append(f"{text} is posted too early")
            # The sender synchronizes behind the send: nothing before the receive may need what comes after.
            if at and clocks.before[receiver, at - 1][rank] > message.step + 1:
                found.append(f"{text} is posted too late")
    return found


SHAPES = [
    (name, stages, SCHEDULES[name].least_microbatches(stages) + more)
    for name, stages, more in product(DELAYED, (2, 3, 4, 5, 8), (0, 1, 4))
]


@pytest.mark.parametrize(("name", "stages", "microbatches"), SHAPES)
@pytest.mark.parametrize("batches", [1, 4])
def test_a_rank_may_synchronize_at_any_action(name, stages, microbatches, batches) -> None:
    batches *= stages if name == "pipedream" else 1
    schedule = make_schedule(name, stages, microbatches, batches, first_batch=2)
    assert hangs(schedule, posted) == []
    assert hangs(schedule, posted_in_the_first_batch) == []


@pytest.mark.parametrize(("name", "stages", "microbatches"), SHAPES)
def test_all_ranks_may_synchronize_at_every_action_of_the_first_batch(name, stages, microbatches) -> None:
    """There is an order of all actions in which each message is taken before its sender goes on."""
    schedule = make_schedule(name, stages, microbatches, 1)
    clocks = Clocks(schedule)
    needs: dict[tuple[int, int], list[tuple[int, int]]] = {
        (rank, step): [(rank, step - 1)] * (step > 0)
        + [clocks.steps[key] for key in predecessors(schedule, rank, action)]
        for rank, row in enumerate(schedule.actions)
        for step, action in enumerate(row)
    }
    for link in clocks.links.values():
        for number, message in enumerate(link):
            at = posted_in_the_first_batch(schedule, link, number)
            needs[message.receiver, at].append((message.rank, message.step))
            if at:
                needs[message.rank, message.step + 1].append((message.receiver, at - 1))
    assert len(list(TopologicalSorter(needs).static_order())) == len(needs)


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_wpipes_ring_posted_as_other_links_would_hang(stages) -> None:
    """One ahead is too early where the messages pause; at their use is too late for the sender."""
    schedule = make_schedule("wpipe", stages, stages + 3, 3)
    assert any(text.endswith("early") for text in hangs(schedule, one_ahead))
    found = hangs(schedule, lambda _, link, number: link[number].use)
    assert found and all(text.endswith("late") for text in found)
