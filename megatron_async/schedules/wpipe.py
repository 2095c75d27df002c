# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""WPipe (ICLR 2022, openreview cw-EmNq5zfD): half of the layers delayed by one step, half of them fresh.

Rank r holds two chunks: chunk 0 (virtual stage r, first half of the layers) uses W_(b-1) and two weight
versions; chunk 1 (virtual stage P + r, second half) uses W_b and one version, so its batches may not overlap:
its update of batch b-1, with a gradient norm over all ranks, comes before its first forward of batch b.

The table is a 1F1B stream in slots of one forward and one backward of a chunk. Slot k of rank r starts at
k (F + B) + r F. Hence a forward reaches the next rank within the same slot, a backward reaches the rank
before in the next slot, and one periodic word of 2M slots gives the whole table. M of its slots are *fresh*
(chunk 1) and M *delayed* (chunk 0); with P = 4, M = 8, x fresh and o delayed:

    xxx ox ox ox ox x oooo          head of P - P//3, M - P pairs, tail of P//3, gap of P

- Rank r runs the forwards of the word in its slots, and the backwards of the word P-1-r slots later.
- Micro-batch n of chunk 1 takes the n-th fresh slot, for its forward and for its backward.
- Micro-batch n of chunk 0 goes backward in the n-th delayed slot and forward P delayed slots earlier.

Why it works, with F : B = 1 : 2 (a slot lasts 3F):

- Forward of chunk 0: on rank P-1 it ends ceil(P/3) slots after its slot began on rank 0, where the forward of
  chunk 1 follows tail + 1 slots later or more.
- Backward of chunk 1: on rank 0 it ends P - P//3 slots, the length of the head, before rank P-1 starts that
  of chunk 0.
- Chunk 1's batches: the last backward travels over P-1 ranks within the gap, and one slot is left over in
  which the reduction of the gradient norm is hidden.
- Chunk 0's batches: batch b has ended on all ranks 2 (M - P) + 1 slots before batch b+2 starts.

Every slot holds a forward and a backward, so for balanced stages, B = 2F and free transfers there is no
bubble in steady state for any M >= P. Rank r holds 2P - r micro-batches of one chunk, P - r/2 of its whole
layers: as much as 2BW on rank 0, whatever M is. The table stays valid for other ratios: up to P = 16, B
between F and 4F leaves a bubble of 6.3 % at most, and of 3.5 % where M >= 2P.
"""

from collections.abc import Iterator
from functools import lru_cache

from megatron_async.schedules.actions import Action, Backward, Forward, Reduce, Update
from megatron_async.schedules.segment import Segment

DELAYED, FRESH = 0, 1
"""The two chunks, and the two kinds of slots."""

# Length of a slot in forwards, F + B with B = 2F.
_SLOT_FORWARDS = 3


@lru_cache(maxsize=64)
def word(stages: int, microbatches: int) -> tuple[int, ...]:
    """Kinds of the 2M slots of one period."""
    tail = stages // _SLOT_FORWARDS
    return (
        (FRESH,) * (stages - tail) + (DELAYED, FRESH) * (microbatches - stages) + (FRESH,) * tail + (DELAYED,) * stages
    )


def wpipe(segment: Segment) -> Iterator[Action]:
    """The periodic word, without the batches outside the segment. Memory is O(M).

    U of chunk 0, batch b comes just before the first forward of its batch b+2, U of chunk 1 before the first forward of
    its batch b+1; if that forward is not in the segment, after the segment's last backward. Chunk 1 always uses W_b.
    Segments compose, and may be shortened while they run, like those of 2bw.
    """
    period = word(segment.stages, segment.microbatches)
    forwards, backwards = _slots(segment, period), _slots(segment, period)
    # The stream begins one period early: forwards of chunk 0 lead by P delayed slots, and P <= M.
    for slot in range((len(segment.batches) + 1) * len(period) + segment.ahead):
        chunk, number = next(forwards)
        yield from _forward(segment, chunk, number + segment.stages if chunk == DELAYED else number)
        if slot >= segment.ahead:
            yield from _backward(segment, *next(backwards))
    for batch in segment.batches[-2:]:
        yield Update(DELAYED, batch)
    yield Update(FRESH, segment.batches[-1])


def _slots(segment: Segment, period: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Kind of each slot and its number among the slots of that kind, from the period before the segment on."""
    counts = [(segment.batches.start - 1) * segment.microbatches] * 2
    while True:
        for chunk in period:
            yield chunk, counts[chunk]
            counts[chunk] += 1


def _forward(segment: Segment, chunk: int, microbatch: int) -> Iterator[Action]:
    batch, position = divmod(microbatch, segment.microbatches)
    if batch not in segment.batches:
        return
    updated = batch - 2 if chunk == DELAYED else batch - 1
    if position == 0 and updated in segment.batches:
        yield Update(chunk, updated)
    yield Forward(chunk, microbatch, _version(segment, chunk, batch))


def _backward(segment: Segment, chunk: int, microbatch: int) -> Iterator[Action]:
    batch, position = divmod(microbatch, segment.microbatches)
    if batch not in segment.batches:
        return
    yield Backward(chunk, microbatch, _version(segment, chunk, batch))
    if position == segment.microbatches - 1:
        yield Reduce(chunk, batch)


def _version(segment: Segment, chunk: int, batch: int) -> int:
    return segment.versions(batch) if chunk == DELAYED else batch
