# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""WPipe (ICLR 2022, openreview cw-EmNq5zfD): the first half of the layers delayed by one step, the second half fresh.

Rank r holds two chunks. Chunk 0 (virtual stage r, first half of the layers) uses W_(b-1) and two weight versions.
Chunk 1 (virtual stage P + r, second half) uses W_b and one version, so its batches do not overlap: its update of batch
b-1, with a gradient norm over all ranks, precedes its first forward of batch b.

The table consists of slots with one forward and one backward of a chunk. Slot k of rank r starts at k (F + B) + r F.
Thus a forward reaches the next rank within its slot and a backward reaches the previous rank in the next slot. The
whole table repeats a word of 2M slots: M are *fresh* (chunk 1) and M are *delayed* (chunk 0). For P = 4, M = 8, with x
fresh and o delayed:

    xxx ox ox ox ox x oooo          head of P - P//3, M - P pairs, tail of P//3, gap of P

- Rank r runs the forwards of the word in its slots, and the backwards P-1-r slots later.
- Micro-batch n of chunk 1 uses the n-th fresh slot for its forward and its backward.
- Micro-batch n of chunk 0 uses the n-th delayed slot for its backward; its forward is P delayed slots earlier.

All dependencies hold for F : B = 1 : 2 (a slot lasts 3F):

- Forward of chunk 0: it ends on rank P-1 ceil(P/3) slots after its slot began on rank 0. The forward of chunk 1 follows
  there at least tail + 1 slots later.
- Backward of chunk 1: it ends on rank 0 P - P//3 slots (the head) before rank P-1 starts that of chunk 0.
- Batches of chunk 1: the last backward passes P-1 ranks within the gap. One slot is left for the reduction of the
  gradient norm.
- Batches of chunk 0: batch b ends on all ranks 2 (M - P) + 1 slots before batch b+2 starts.

Messages come round on two edges: activations from the last rank to rank 0, gradients from rank 0 to the last rank. They
lie up to P slots before they are used. A receive that is posted long before its message can be sent, or a send that is
taken long after, hangs a rank that synchronizes its device. So their receives are posted when the message comes with
F : B = 1 : 2 (`Compute.due`): rank 0 posts that of the activation of a delayed slot ceil(P/3) slots later, the last
rank that of the gradient of a fresh slot P - ceil(P/3) slots later. `tests/unit/schedules/test_receives.py` proves from
the tables that this is right whatever time anything takes.

Every slot is full, so balanced stages with B = 2F and free transfers have no bubble in steady state for any M >= P.
Rank r holds 2P - r micro-batches of one chunk, P - r/2 of its layers, for any M; rank 0 holds as much as in 2BW.
The table is valid for other ratios: for P <= 16 and B between F and 4F the bubble is at most 6.3 %, and 3.5 % for
M >= 2P.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import repeat

from megatron_async.schedules.actions import Action, Backward, Forward, Reduce, Update
from megatron_async.schedules.segment import Segment

DELAYED, FRESH = 0, 1
"""The two chunks and kinds of slots."""

_SLOT_FORWARDS = 3  # length F + B of a slot for B = 2F


@lru_cache(maxsize=64)
def word(stages: int, microbatches: int) -> tuple[int, ...]:
    """Kinds of the 2M slots of one period."""
    tail = stages // _SLOT_FORWARDS
    return (
        (FRESH,) * (stages - tail) + (DELAYED, FRESH) * (microbatches - stages) + (FRESH,) * tail + (DELAYED,) * stages
    )


def wpipe(segment: Segment) -> Iterator[Action]:
    """The periodic word, restricted to the batches of the segment.

    U(b) comes before the first forward of batch b+2 on chunk 0, of batch b+1 on chunk 1, or at the end of the segment.
    A running segment may be shortened as in `two_bw`.
    """
    period = word(segment.stages, segment.microbatches)
    forwards, backwards, due = _slots(segment, period), _slots(segment, period), _due(segment, period)
    # Start one period early: forwards of chunk 0 lead by P <= M delayed slots.
    for slot in range((len(segment.batches) + 1) * len(period) + segment.ahead):
        (chunk, number), receives = next(forwards), next(due)
        yield from _forward(segment, chunk, number + segment.stages if chunk == DELAYED else number, receives)
        if slot >= segment.ahead:
            yield from _backward(segment, *next(backwards), receives)
    for batch in segment.batches[-2:]:
        yield Update(DELAYED, batch)
    yield Update(FRESH, segment.batches[-1])


def _slots(segment: Segment, period: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(chunk, micro-batch) of each slot, from one period before the segment."""
    counts = [(segment.batches.start - 1) * segment.microbatches] * 2
    while True:
        for chunk in period:
            yield chunk, counts[chunk]
            counts[chunk] += 1


def _due(segment: Segment, period: tuple[int, ...]) -> Iterator[int]:
    """For each slot, how many messages have come round to this rank before it."""
    around = -(-segment.stages // _SLOT_FORWARDS)
    first, last = segment.stage == 0 < segment.ahead, segment.ahead == 0 < segment.stage
    count, slots = 0, _slots(segment, period)
    yield from repeat(0, around if first else segment.stages - around)
    for chunk, number in slots:
        if first and chunk == DELAYED:
            count += number + segment.stages in segment.micro_batches
        elif last and chunk == FRESH:
            count += number in segment.micro_batches
        yield count


def _forward(segment: Segment, chunk: int, microbatch: int, due: int) -> Iterator[Action]:
    batch, position = divmod(microbatch, segment.microbatches)
    if batch not in segment.batches:
        return
    updated = batch - 2 if chunk == DELAYED else batch - 1
    if position == 0 and updated in segment.batches:
        yield Update(chunk, updated)
    yield Forward(chunk, microbatch, _version(segment, chunk, batch), due)


def _backward(segment: Segment, chunk: int, microbatch: int, due: int) -> Iterator[Action]:
    batch, position = divmod(microbatch, segment.microbatches)
    if batch not in segment.batches:
        return
    yield Backward(chunk, microbatch, _version(segment, chunk, batch), due)
    if position == segment.microbatches - 1:
        yield Reduce(chunk, batch)


def _version(segment: Segment, chunk: int, batch: int) -> int:
    return segment.versions(batch) if chunk == DELAYED else batch
