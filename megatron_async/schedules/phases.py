# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Which batches of a run are delayed, and which updates are corrected."""

from dataclasses import dataclass

from megatron_async.schedules.actions import VersionRule


@dataclass(frozen=True, slots=True)
class Phases:
    """A synchronous start, a delayed middle, a synchronous cooldown.

    Attributes:
        sync_start: number S of synchronous batches at the start.
        cooldown_from: number K of the first synchronous batch at the end; the run's length for none.
    """

    sync_start: int
    cooldown_from: int

    def synchronous(self, batch: int) -> bool:
        """Whether the pipe is drained before and after this batch, which is computed with the newest weights."""
        return batch < self.sync_start or batch >= self.cooldown_from

    def corrected(self, batch: int) -> bool:
        """Whether a correction applies: batch S still had fresh weights, so its update is plain."""
        return self.sync_start < batch < self.cooldown_from

    def end_of_segment(self, batch: int, end: int) -> int:
        """The first batch after `batch`, at most `end`, that cannot be in the same segment as it."""
        return batch + 1 if self.synchronous(batch) else min(self.cooldown_from, end)

    def versions(self, delay: int) -> VersionRule:
        """Batch -> weight version it is computed with, where weights are `delay` updates old in the delayed middle."""
        return lambda batch: batch if self.synchronous(batch) else max(batch - delay, self.sync_start)
