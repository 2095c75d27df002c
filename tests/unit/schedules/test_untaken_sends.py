# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""In steady state no stage waits for a send: when it sends a message, the table proves that all but the last few have
been taken."""

from collections import defaultdict
from itertools import product

import pytest

from megatron_async.schedules import SCHEDULES, Backward, Forward, Schedule, make_schedule
from megatron_async.schedules.dependencies import execute, key_of, predecessors, previous_stage


def most_untaken(schedule: Schedule) -> int:
    """Most messages of one direction between two ranks of which a sender cannot know that they have been taken.

    What a rank knows of the others is what its actions have waited for, directly or through other ranks, whatever
    time anything takes. Sends while the pipe fills or drains, in the first and last quarter, do not count.
    """
    numbers = schedule.microbatch_range
    margin = len(numbers) // 4
    takers = {
        source: (rank, step)
        for rank, row in enumerate(schedule.actions)
        for step, action in enumerate(row)
        if (source := previous_stage(schedule, rank, action)) is not None
    }
    known = [[-1] * schedule.stages for _ in range(schedule.stages)]  # the last step of each rank that has ended
    at_end: dict[tuple[int, str, int, int], list[int]] = {}
    taken_at: defaultdict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
    worst = 0
    for rank, step in execute(schedule)[0]:
        action = schedule.actions[rank][step]
        if isinstance(action, Forward | Backward):
            for key in predecessors(schedule, rank, action):
                known[rank] = [max(pair) for pair in zip(known[rank], at_end[key], strict=True)]
        known[rank][rank] = step
        at_end[key_of(rank, action)] = list(known[rank])
        if (taker := takers.get(key_of(rank, action))) is None:
            continue
        # Links are first in, first out: messages are taken in the order in which they are sent.
        sent = taken_at[rank, action.kind]
        sent.append(taker)
        if numbers.start + margin <= action.microbatch < numbers.stop - margin:
            worst = max(worst, sum(known[rank][owner] < at for owner, at in sent))
    return worst


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "1f1b"])
@pytest.mark.parametrize(("stages", "factor"), list(product((2, 3, 4, 8, 16), (1, 2, 3))))
def test_links_wait_for_no_send(name, stages, factor) -> None:
    definition = SCHEDULES[name]
    microbatches = factor * definition.least_microbatches(stages)
    batches = 8 if definition.least_microbatches(stages) > 1 else 8 * stages
    assert most_untaken(make_schedule(name, stages, microbatches, batches)) <= definition.untaken_sends(stages)


def test_the_plain_streams_numbers_are_reached() -> None:
    assert most_untaken(make_schedule("2bw", 4, 8, 8)) == 2
    assert most_untaken(make_schedule("2bw-eager", 4, 8, 8)) == 3
