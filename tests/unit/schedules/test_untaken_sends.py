# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""In steady state no stage waits for a send: when it sends a message, the table proves that all but the last few have
been taken."""

from itertools import product

import pytest

from megatron_async.schedules import SCHEDULES, Schedule, make_schedule
from tests.unit.schedules.clocks import Clocks


def most_untaken(schedule: Schedule) -> int:
    """Most messages of one direction between two ranks of which a sender cannot know that they have been taken.

    Sends while the pipe fills or drains, in the first and last quarter, do not count.
    """
    clocks, worst = Clocks(schedule), 0
    for link in clocks.links.values():
        quarter = len(link) // 4
        for number, message in list(enumerate(link))[quarter : len(link) - quarter]:
            known = clocks.before[message.rank, message.step][message.receiver]
            worst = max(worst, sum(earlier.use >= known for earlier in link[: number + 1]))
    return worst


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "1f1b"])
@pytest.mark.parametrize(("stages", "factor"), list(product((2, 3, 4, 8, 16), (1, 2, 3))))
def test_links_wait_for_no_send(name, stages, factor) -> None:
    definition = SCHEDULES[name]
    microbatches = factor * definition.least_microbatches(stages)
    batches = 8 if definition.least_microbatches(stages) > 1 else 8 * stages
    assert most_untaken(make_schedule(name, stages, microbatches, batches)) <= definition.untaken_sends(stages)


def test_the_numbers_are_reached() -> None:
    assert most_untaken(make_schedule("2bw", 4, 8, 8)) == 2
    assert most_untaken(make_schedule("2bw-eager", 4, 8, 8)) == 3
    assert most_untaken(make_schedule("wpipe", 4, 8, 8)) == 4
