# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Batch sizes of a run: constant, or in steps by the samples before (`--step-batch-size-schedule`)."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Samples of a batch.

    Attributes:
        steps: (samples before, samples of a batch from there on), the first from 0 on.
    """

    steps: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, args: argparse.Namespace) -> "BatchSizes":
        """Those of a command line; ValueError for a schedule that cannot be read."""
        schedule = getattr(args, "step_batch_size_schedule", None)
        if schedule is None:
            return cls(((0, args.global_batch_size),))
        return cls(tuple(StepBatchsizeNumMicroBatchesCalculator._parse_schedule(schedule, args.seq_length)))

    def at(self, consumed: int) -> int:
        """Samples of the batch before which `consumed` samples were read."""
        return next(size for start, size in reversed(self.steps) if start <= consumed)

    def batches_to_change(self, consumed: int) -> int | None:
        """Batches of the present size from there on; None if it stays."""
        later = [start for start, _ in self.steps if start > consumed]
        return -(-(later[0] - consumed) // self.at(consumed)) if later else None

    def before(self, batch: int) -> int:
        """Samples of all batches with a smaller number."""
        return next(consumed + (batch - first) * size for first, consumed, size in self._spans() if batch >= first)

    def batches(self, samples: int) -> int:
        """Fewest batches with so many samples."""
        spans = self._spans()
        return next(first - (consumed - samples) // size for first, consumed, size in spans if samples > consumed)

    def _spans(self) -> Iterator[tuple[int, int, int]]:
        """(first batch, samples before it, samples of a batch) of each size, the last one first."""
        spans = [(0, 0, self.steps[0][1])]
        for (_, size), (start, following) in pairwise(self.steps):
            first, consumed, _ = spans[-1]
            batches = max(0, -(-(start - consumed) // size))
            spans.append((first + batches, consumed + batches * size, following))
        return reversed(spans)
