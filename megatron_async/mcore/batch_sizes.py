# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Batch sizes of a run: constant, or in steps by the samples before (`--step-batch-size-schedule`).

`--rampup-batch-size START INCREMENT SAMPLES` is such a schedule: from START to --global-batch-size in equal steps over
SAMPLES samples, as in Megatron-LM before Megatron-Core 0.19, which ignores it.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
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

    def samples(self, batch: int, last: int | None = None) -> str:
        """First and last sample of a batch, or of the batches up to `last`, in the order of the run."""
        return f"{self.before(batch)} to {self.before((batch if last is None else last) + 1) - 1}"

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


def ramp(rampup: Sequence[str], global_batch_size: int | None, seq_length: int) -> str:
    """The value of `--step-batch-size-schedule` (tokens:samples) that `--rampup-batch-size` means.

    A batch before which `consumed` samples were read holds START + INCREMENT * floor(consumed / (SAMPLES / steps)), at
    most the global batch size; the last one from SAMPLES on.

    Raises:
        ValueError: the rule that the values break.
    """
    if global_batch_size is None:
        raise ValueError("it ends at --global-batch-size: give it")
    start, increment, samples = map(int, rampup)
    if min(start, increment) < 1 or samples < 0:
        raise ValueError("START and INCREMENT must be at least 1, SAMPLES at least 0")
    steps, rest = divmod(global_batch_size - start, increment)
    if steps < 0 or rest:
        raise ValueError(
            f"--global-batch-size {global_batch_size} must be START {start} and a multiple of INCREMENT {increment}"
        )
    sizes = {math.ceil(number * samples / max(1, steps)): start + number * increment for number in range(steps + 1)}
    return " ".join(f"{consumed * seq_length}:{size}" for consumed, size in sizes.items())
