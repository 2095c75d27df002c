# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Phases of a run: synchronous start, delayed middle, synchronous cooldown."""

from dataclasses import dataclass

from megatron_async.schedules.actions import VersionRule


@dataclass(frozen=True, slots=True)
class Phases:
    """Decides which batches are delayed and which updates are corrected.

    Attributes:
        sync_start: number S of synchronous batches at the start.
        cooldown_from: first batch K of the cooldown; the number of batches of the run if there is none.
    """

    sync_start: int
    cooldown_from: int

    def synchronous(self, batch: int) -> bool:
        """Whether this batch uses the newest weights. The pipe is drained before and after it."""
        return batch < self.sync_start or batch >= self.cooldown_from

    def corrected(self, batch: int, *, from_first: bool = False) -> bool:
        """Whether a correction applies. To batch S, which used the newest weights, only with `from_first`."""
        return self.sync_start + (not from_first) <= batch < self.cooldown_from

    def end_of_segment(self, batch: int, end: int) -> int:
        """End of the segment that starts with `batch`, at most `end`."""
        return batch + 1 if self.synchronous(batch) else min(self.cooldown_from, end)

    def versions(self, delay: int) -> VersionRule:
        """Rule of weight versions for a delay of `delay` updates in the delayed middle."""
        return lambda batch: batch if self.synchronous(batch) else max(batch - delay, self.sync_start)
