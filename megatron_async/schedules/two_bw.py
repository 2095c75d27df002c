# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""1F1B streams: synchronous 1F1B, PipeDream-2BW and eager 2BW.

1F1B (PipeDream-Flush) drains and updates after every batch. 2BW (arXiv 2006.09503) is the same stream without flushes:
gradients are one step old, and two weight versions are alive. Stage s runs P-1-s forwards ahead of its backwards. A
stage then has two slots of F + B for the round trip of a micro-batch to the next stage; the compute of both stages
fills them, so transfers are exposed.

Eager 2BW runs 2 (P-1-s) forwards ahead (eager 1F1B, arXiv 2211.05322). The round trip has three slots, so transfers of
up to (F + B) / 2 are hidden. It holds nearly twice the activations.
"""

from collections.abc import Iterator
from dataclasses import replace

from megatron_async.schedules.actions import Action, Backward, Forward, Reduce, Update
from megatron_async.schedules.segment import Segment


def least_microbatches(stages: int, *, lead: int) -> int:
    """Fewest micro-batches per batch: the number in flight on stage 0."""
    return lead * (stages - 1) + 1


def two_bw(segment: Segment, *, lead: int) -> Iterator[Action]:
    """One stream over all batches of the segment.

    R(b) follows the last backward of batch b. U(b) comes before the first forward of batch b+2, or at the end of the
    segment. Versions depend on the batch number only, so draining does not change the results. A running segment may be
    shortened to n' >= b + 3 - first_batch batches: the plans agree up to and including U(b).

    Args:
        lead: forwards that a stage runs ahead of the next stage: 1, or 2 for eager 2BW.
    """
    return _stream(segment, warmup=lead * segment.ahead)


def one_f_one_b(segment: Segment) -> Iterator[Action]:
    """One stream per batch."""
    for batch in segment.batches:
        yield from _stream(replace(segment, batches=range(batch, batch + 1)), warmup=segment.ahead)


def _stream(segment: Segment, *, warmup: int) -> Iterator[Action]:
    """From an empty pipe to an empty pipe, `warmup` forwards ahead of the backwards."""
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
