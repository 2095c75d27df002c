# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A segment: consecutive batches between two drains of the pipeline."""

from dataclasses import dataclass

from megatron_async.schedules.actions import VersionRule


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment as one stage plans it.

    Attributes:
        stages: number P of pipeline ranks.
        stage: index of this stage.
        microbatches: number M of micro-batches per batch.
        batches: numbers of the batches.
        versions: rule of weight versions of chunk 0; other chunks follow the schedule's own rule.
    """

    stages: int
    stage: int
    microbatches: int
    batches: range
    versions: VersionRule

    @property
    def ahead(self) -> int:
        """P-1-s: forwards that 1F1B runs before the first backward."""
        return self.stages - 1 - self.stage

    @property
    def micro_batches(self) -> range:
        """Numbers of the micro-batches."""
        return range(self.batches.start * self.microbatches, self.batches.stop * self.microbatches)
