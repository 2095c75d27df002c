# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Compute of each stage in a running job, and a better split where one is slower than the others."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu

from megatron_async.mcore.parallel import device
from megatron_async.planning import balance, devices
from megatron_async.planning.costs import CostModel
from megatron_async.planning.parameters import blocks, numbers_by_chunk
from megatron_async.planning.resolve import microbatches_of
from megatron_async.planning.split import most_even
from megatron_async.planning.timing import BlockTime
from megatron_async.platform.host import Reduced
from megatron_async.schedules.arguments import schedule_of

SLOW = 0.05
"""Share by which a stage must be slower than the mean of the others for a hint."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Arguments and estimated times of a run's blocks; made before its process groups exist."""

    args: argparse.Namespace
    times: Sequence[BlockTime]

    @classmethod
    def of(cls, args: argparse.Namespace) -> "Expected | None":
        """None where a run has one stage or Megatron's own schedule, or ends before the first report."""
        pipelined = args.pipeline_model_parallel_size > 1 and not schedule_of(args).megatron
        if not pipelined or not 0 < args.log_stage_balance <= (args.train_iters or 0):
            return None
        known = balance.with_vocabulary(args)
        return cls(args, CostModel(known, devices.find(args.plan_device)).blocks(blocks(known)))

    def reduce(self, group: dist.ProcessGroup | None, seconds: Mapping[str, float]) -> Reduced[Mapping[str, Any]]:
        """`report` of all stages, each by its slowest rank, from this rank's mean seconds of a batch by kind."""
        computed = torch.zeros(self.args.pipeline_model_parallel_size, dtype=torch.float64, device=device())
        computed[mpu.get_pipeline_model_parallel_rank()] = sum(seconds.values())
        return Reduced(computed, group, self.report, dist.ReduceOp.MAX)

    def report(self, seconds: Sequence[float]) -> Mapping[str, Any]:
        """Milliseconds of each stage, and a hint where one is slow, from the seconds of each stage for a batch."""
        values: dict[str, Any] = {"stage_compute_ms": [1000 * own for own in seconds]}
        hint = self.hint(seconds) if min(seconds) > 0 else None
        return values | ({"stage_hint": hint} if hint else {})

    def hint(self, seconds: Sequence[float]) -> str | None:
        """What to do about the slowest stage, from the seconds of each stage for a batch.

        A stage's blocks share what was measured in proportion to their estimates.
        """
        slowest = max(range(len(seconds)), key=lambda stage: seconds[stage])
        others = (sum(seconds) - seconds[slowest]) / (len(seconds) - 1)
        if not 0 < others < seconds[slowest] / (1 + SLOW):
            return None
        text = f"stage {slowest} is {seconds[slowest] / others - 1:.0%} slower than the others"
        scaled = [time.of_batch(microbatches_of(self.args)) for time in self.times]
        for stage, chunks in enumerate(numbers_by_chunk(self.args)):
            numbers = [number for chunk in chunks for number in chunk]
            by = seconds[stage] / (sum(scaled[number] for number in numbers) or 1.0)
            for number in numbers:
                scaled[number] *= by
        better = most_even(scaled, len(seconds), schedule_of(self.args).chunks)
        if better is not None and better[0] < 0.98 * seconds[slowest]:
            name, split = balance.split_option(self.args, better[1])
            return (
                f"{text}: {name} '{split}' would make the slowest stage {1 - better[0] / seconds[slowest]:.0%} faster; "
                "a resume may take it"
            )
        return f"{text}: no other split is faster; if the stages' layers are the same, look at its host and device"
