# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""One continuous 1F1B stream over several batches: the body of both 1f1b and 2bw."""

from collections.abc import Iterator

from megatron_async.schedules.actions import Action, Backward, Forward, Reduce, Update, VersionRule


def stream_actions(
    *, microbatches: int, batches: int, first_batch: int, versions: VersionRule, warmup: int
) -> Iterator[Action]:
    """Actions of one stage from an empty pipe, through `batches` batches without a break, to an empty pipe.

    The stage runs `warmup` forwards ahead of its backwards. The update of batch b is due just before the first
    forward of batch b+2, the first that needs it with a delay of one; updates with no such forward in the
    stream follow its last backward. Lazy: memory is O(1) in the number of batches.
    """
    first = first_batch * microbatches
    stop = first + batches * microbatches
    for microbatch in range(first, stop + warmup):
        if microbatch < stop:
            batch, position = divmod(microbatch, microbatches)
            if position == 0 and batch - 2 >= first_batch:
                yield Update(0, batch - 2)
            yield Forward(0, microbatch, versions(batch))
        done = microbatch - warmup
        if first <= done < stop:
            batch, position = divmod(done, microbatches)
            yield Backward(0, done, versions(batch))
            if position == microbatches - 1:
                yield Reduce(0, batch)
    for batch in range(max(first_batch, first_batch + batches - 2), first_batch + batches):
        yield Update(0, batch)
