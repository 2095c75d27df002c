# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass

from megatron_async.pipeline.reduction import Reduction, poll_in_order


@dataclass
class Work:
    """A handle that completes when told to; waiting completes it too, and is counted."""

    completed: bool = False
    waited: int = 0

    def is_completed(self) -> bool:
        return self.completed

    def wait(self) -> None:
        self.waited += 1
        self.completed = True


def test_polling_goes_as_far_as_is_complete_and_never_waits():
    first, second, third = Work(), Work(), Work()
    log: list[str] = []

    def steps():
        log.append("first")
        yield [first, None]
        log.append("second")
        yield [second, third]
        log.append("end")

    reduction = Reduction(steps())
    reduction.poll()
    assert log == ["first"] and first.waited == 0
    first.completed = True
    reduction.poll()
    assert log == ["first", "second"]
    second.completed = True
    reduction.poll()
    assert log == ["first", "second"] and third.waited == 0
    third.completed = True
    reduction.poll()
    assert log == ["first", "second", "end"] and reduction.done


def test_finish_waits_for_the_rest():
    works = [Work(), Work()]
    reduction = Reduction([work] for work in works)
    reduction.finish()
    assert reduction.done and all(work.waited for work in works)


def test_steps_without_collectives_are_done_at_once():
    reduction = Reduction(iter([[], [None]]))
    reduction.poll()
    assert reduction.done


def test_a_batch_waits_for_the_batches_before_it():
    """Else its collectives could be paired with another rank's of an earlier batch."""

    class Pending:
        done, polls = False, 0

        def poll(self) -> None:
            self.polls += 1

    first, second = Pending(), Pending()
    poll_in_order([first, second])
    assert (first.polls, second.polls) == (1, 0)
    first.done = True
    poll_in_order([first, second])
    assert (first.polls, second.polls) == (2, 1)
