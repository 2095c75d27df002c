# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""WPipe (ICLR 2022, openreview cw-EmNq5zfD): half of the layers delayed by one step, half of them fresh.

Rank r holds two chunks: chunk 0 (virtual stage r, first half of the layers) uses W_(b-1) and two weight
versions; chunk 1 (virtual stage P + r, second half) uses W_b and one version, so its batches may not overlap:
its update of batch b-1, with a gradient norm over all ranks, comes before its first forward of batch b.

The table is a 1F1B stream in slots of one chunk-forward (time F) and one chunk-backward (time B). Slot k of
rank r starts at k (F + B) + r F. Hence a forward reaches the next rank within the same slot, a backward
reaches the rank before it in the next slot, and the whole table follows from one periodic word:

- the word has 2M slots, M *fresh* ones (F and B of chunk 1) and M *delayed* ones (F and B of chunk 0);
- every rank runs the forwards of the word in its slots, and the backwards of the word P-1-r slots later;
- the fresh slots of a batch fill a window that leaves at least P-1 slots to the next one, the time in which the
  last backward travels from rank P-1 to rank 0 and every rank can finish the batch;
- forwards of chunk 0 take the latest delayed slot that is early enough for the forward of chunk 1, backwards of
  chunk 0 the earliest one after the backward of chunk 1. Both keep the order of micro-batches, so the first is
  a constant number `lead` of delayed slots ahead and the second a constant number `lag` behind.

No slot is ever empty, so there is no bubble in steady state for any M >= P (balanced stages, B = 2F, transfers
that take no time). Rank r holds (lead + lag + P - r) / 2 micro-batches of its whole layers: P on rank 0 like
2BW, or P + 1/2 with the slack below, whatever M is.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from megatron_async.schedules.actions import Action, Backward, Forward, Reduce, Update, VersionRule, delayed_versions
from megatron_async.schedules.shape import check_stage, overlap_problems, raise_problems

DELAYED, FRESH = 0, 1


@dataclass(frozen=True, slots=True)
class Word:
    """One period of the table; slot numbers run on over all periods.

    Attributes:
        slots: position of each micro-batch of a batch among the 2M slots, `slots[chunk]`, ascending.
        lead: delayed slots between the forward of a micro-batch and its own number.
        lag: delayed slots between its own number and the backward of a micro-batch.
    """

    slots: tuple[tuple[int, ...], tuple[int, ...]]
    lead: int
    lag: int

    def slot(self, chunk: int, number: int) -> int:
        """Slot of the number-th delayed or fresh slot, counted from the start of period 0."""
        period, position = divmod(number, len(self.slots[chunk]))
        return 2 * len(self.slots[chunk]) * period + self.slots[chunk][position]


@lru_cache(maxsize=64)
def best_word(stages: int, microbatches: int) -> Word:
    """The word with the fewest live activations among those that this module considers.

    Two ways to spread the delayed slots inside the fresh window are tried, with every split of the fresh slots
    that have no partner between its start and its end.
    """
    # One slot more than needed between two batches of chunk 1, where there is room, hides its norm's reduction.
    gap = min(stages, microbatches)
    pairs = microbatches - gap
    candidates = [
        _word([FRESH] * head + pair * pairs + [FRESH] * (gap - head) + [DELAYED] * gap, stages)
        for head in range(gap + 1)
        for pair in ([FRESH, DELAYED], [DELAYED, FRESH])
    ]
    valid = [word for word in candidates if _batches_fit(word, stages, microbatches)]
    return min(valid, key=lambda word: (word.lead + word.lag, word.lead))


def _word(kinds: list[int], stages: int) -> Word:
    delayed = tuple(slot for slot, kind in enumerate(kinds) if kind == DELAYED)
    fresh = tuple(slot for slot, kind in enumerate(kinds) if kind == FRESH)
    blank = Word(slots=(delayed, fresh), lead=0, lag=0)
    # Chunk 0 ends on rank P-1, P forwards after rank 0 started the slot; chunk 1 starts on rank 0.
    forward_slots = -(-stages // 3)
    # Chunk 1's backward ends on rank 0, P-1 slots after rank P-1; the clock of rank P-1 runs P-1 forwards late.
    backward_slots = stages - stages // 3
    lead = lag = 0
    for number, slot in enumerate(fresh):
        while blank.slot(DELAYED, number - lead) + forward_slots > slot:
            lead += 1
        while blank.slot(DELAYED, number + lag) < slot + backward_slots:
            lag += 1
    return Word(slots=(delayed, fresh), lead=lead, lag=lag)


def _batches_fit(word: Word, stages: int, microbatches: int) -> bool:
    """Whether all ranks finish batch b of chunk 0 before rank 0 starts its batch b+2."""
    last_backward = word.slot(DELAYED, microbatches - 1 + word.lag)
    return word.slot(DELAYED, 2 * microbatches - word.lead) >= last_backward + stages


def stage_actions(
    *,
    stages: int,
    microbatches: int,
    batches: int,
    stage: int,
    first_batch: int = 0,
    versions: VersionRule = delayed_versions(),
) -> Iterator[Action]:
    """Lazy plan of a segment for one rank: the periodic word, without the actions of batches outside the segment.

    Memory is O(M). U of chunk 0, batch b comes immediately before the first forward of its batch b+2, U of chunk 1
    before the first forward of its batch b+1; if that forward is not in the segment, after its last backward.
    Segments compose, and may be shortened while they run, as those of 2bw.

    Args:
        stage: the rank; it holds virtual stages `stage` and `stages + stage`.
        versions: rule for chunk 0; chunk 1 always uses W_b.

    Raises:
        ValueError: numbers out of range, or fewer micro-batches than stages.
    """
    check_stage(
        stages=stages, microbatches=microbatches, batches=batches, stage=stage, first_batch=first_batch
    )
    if batches > 1:
        raise_problems(overlap_problems(name="wpipe", stages=stages, microbatches=microbatches))
    return _Segment(
        word=best_word(stages, microbatches),
        microbatches=microbatches,
        batches=range(first_batch, first_batch + batches),
        backward_delay=stages - 1 - stage,
        versions=versions,
    ).actions()


@dataclass(frozen=True, slots=True)
class _Segment:
    word: Word
    microbatches: int
    batches: range
    backward_delay: int
    versions: VersionRule

    def actions(self) -> Iterator[Action]:
        for slot in self._slots():
            yield from self._forward(slot)
            yield from self._backward(slot - self.backward_delay)
        for batch in range(max(self.batches.start, self.batches.stop - 2), self.batches.stop):
            yield Update(DELAYED, batch)
        yield Update(FRESH, self.batches.stop - 1)

    def _slots(self) -> range:
        """Slots from the first forward of the segment to its last backward."""
        first = self.batches.start * self.microbatches
        last = self.batches.stop * self.microbatches - 1
        return range(
            self.word.slot(DELAYED, first - self.word.lead),
            self.word.slot(DELAYED, last + self.word.lag) + self.backward_delay + 1,
        )

    def _number(self, slot: int) -> tuple[int, int]:
        """Kind of a slot and its number among the slots of that kind."""
        period, position = divmod(slot, 2 * self.microbatches)
        chunk, index = _positions(self.word)[position]
        return chunk, period * self.microbatches + index

    def _forward(self, slot: int) -> Iterator[Action]:
        chunk, number = self._number(slot)
        microbatch = number + self.word.lead if chunk == DELAYED else number
        batch, position = divmod(microbatch, self.microbatches)
        if batch not in self.batches:
            return
        updated = batch - 2 if chunk == DELAYED else batch - 1
        if position == 0 and updated in self.batches:
            yield Update(chunk, updated)
        yield Forward(chunk, microbatch, self._version(chunk, batch))

    def _backward(self, slot: int) -> Iterator[Action]:
        chunk, number = self._number(slot)
        microbatch = number - self.word.lag if chunk == DELAYED else number
        batch, position = divmod(microbatch, self.microbatches)
        if batch not in self.batches:
            return
        yield Backward(chunk, microbatch, self._version(chunk, batch))
        if position == self.microbatches - 1:
            yield Reduce(chunk, batch)

    def _version(self, chunk: int, batch: int) -> int:
        return self.versions(batch) if chunk == DELAYED else batch


@lru_cache(maxsize=64)
def _positions(word: Word) -> tuple[tuple[int, int], ...]:
    """For each slot of a period its kind and its index among the slots of that kind."""
    places = [(slot, chunk, index) for chunk in (0, 1) for index, slot in enumerate(word.slots[chunk])]
    return tuple((chunk, index) for _, chunk, index in sorted(places))
