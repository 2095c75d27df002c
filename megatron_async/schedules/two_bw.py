# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""1F1B streams: synchronous 1F1B, PipeDream-2BW and its eager form.

1F1B (PipeDream-Flush) drains and updates after every batch. 2BW (arXiv 2006.09503) is the same stream without
flushes: gradients one step old, two weight versions. Stage s runs P-1-s forwards ahead of its backwards, each stage one
more than the next. That is just enough where transfers are free: between two neighbors, the round from a forward over
its successor back to the next forward is two slots of F + B and two transfers long and has to fit into two slots.

The eager stream runs 2 (P-1-s) ahead, two more than the next stage (eager 1F1B, arXiv 2211.05322). The round then has
three slots: transfers of up to (F + B) / 2 cost nothing. It holds nearly twice the activations.
"""

from collections.abc import Iterator
from dataclasses import replace

from megatron_async.schedules.actions import Action, Backward, Forward, Reduce, Update
from megatron_async.schedules.segment import Segment


def least_microbatches(stages: int, *, lead: int) -> int:
    """Fewest micro-batches of a batch: as many as stage 0 has in flight."""
    return lead * (stages - 1) + 1


def two_bw(segment: Segment, *, lead: int) -> Iterator[Action]:
    """One stream over all batches.

    R(b) follows the last backward of batch b. U(b) comes just before the first forward of batch b+2, or after the last
    backward of the segment if b+2 is not in it. Segments compose: versions go by the number of the batch, so a drain
    changes no number. A running segment may be shortened: for n' < n batches with n' >= b + 3 - first_batch, the plans
    for n' and n batches are the same up to and including U(b).

    Args:
        lead: forwards that a stage runs ahead of its backwards beyond those of the next stage: 1, or 2 when eager.
    """
    return _stream(segment, warmup=lead * segment.ahead)


def one_f_one_b(segment: Segment) -> Iterator[Action]:
    """A drained stream for each batch."""
    for batch in segment.batches:
        yield from _stream(replace(segment, batches=range(batch, batch + 1)), warmup=segment.ahead)


def _stream(segment: Segment, *, warmup: int) -> Iterator[Action]:
    """From an empty pipe to an empty pipe, `warmup` forwards ahead. Lazy: memory is O(1) in the number of batches."""
    numbers, batches = segment.micro_batches, segment.batches
    for microbatch in range(numbers.start, numbers.stop + warmup):
        if microbatch < numbers.stop:
            batch, position = divmod(microbatch, segment.microbatches)
            if position == 0 and batch - 2 in batches:
                yield Update(0, batch - 2)
            yield Forward(0, microbatch, segment.versions(batch))
        done = microbatch - warmup
        if done in numbers:
            batch, position = divmod(done, segment.microbatches)
            yield Backward(0, done, segment.versions(batch))
            if position == segment.microbatches - 1:
                yield Reduce(0, batch)
    for batch in batches[-2:]:
        yield Update(0, batch)
