# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Callbacks that add what Megatron logs on request: norms, zeros, times, memory, the world size, progress.txt."""

import math
import os
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_async.mcore.parallel import device
from megatron_async.platform.host import Reduced, to_device
from megatron_async.training.callbacks import Callback, CompletedBatch, PeriodicTimes

if TYPE_CHECKING:
    from megatron_async.training.loop import Loop

_MEMORY = {
    "mem_reserved_bytes": "reserved_bytes.all.current",
    "mem_allocated_bytes": "allocated_bytes.all.current",
    "mem_max_allocated_bytes": "allocated_bytes.all.peak",
    "mem_allocated_count": "allocation.all.current",
}


class Totals(Callback):
    """Logs `params_norm` after each update, and `num_zeros` in its gradient.

    Args:
        squares: this rank's part of the squared norm; None leaves it out.
        zeros: this rank's part of the zeros of a batch; None leaves them out.
        group: process group of its own over all ranks; None for one process.
    """

    def __init__(
        self,
        squares: Callable[[], torch.Tensor] | None,
        zeros: Callable[[int], torch.Tensor] | None,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._squares, self._zeros, self._group = squares, zeros, group

    def on_batch_end(self, batch: CompletedBatch) -> None:
        if self._squares is not None:
            batch.pending.append(
                Reduced(self._squares(), self._group, lambda sums: {"params_norm": math.sqrt(sums[0])})
            )
        if self._zeros is not None:
            zeros = self._zeros(batch.number)
            batch.pending.append(Reduced(zeros, self._group, lambda sums: {"num_zeros": round(sums[0])}))


class Times(PeriodicTimes):
    """Logs a batch's time of forwards, backwards and update: the mean since the last time, of the slowest rank in each.

    Args:
        interval: every so many batches.
        group: process group of its own over all ranks; None for one process.
    """

    def __init__(self, interval: int, group: dist.ProcessGroup | None) -> None:
        super().__init__(interval)
        self._group = group

    def reduce(self, seconds: Mapping[str, float]) -> Reduced[dict[str, float]]:
        return Reduced(to_device([seconds[kind] for kind in "FBU"], device()), self._group, _times, dist.ReduceOp.MAX)


def _times(seconds: list[float]) -> dict[str, float]:
    names = ("forward_ms", "backward_ms", "update_ms")
    return {name: 1000 * own for name, own in zip(names, seconds, strict=True)}


class WorldSize(Callback):
    """Logs the number of ranks."""

    def on_batch_end(self, batch: CompletedBatch) -> None:
        batch.values["world_size"] = dist.get_world_size()


class Memory(Callback):
    """Logs the allocator's counters of this rank's GPU."""

    def on_batch_end(self, batch: CompletedBatch) -> None:
        counters = torch.cuda.memory_stats()
        batch.values |= {name: counters[counter] for name, counter in _MEMORY.items()}


class Progress(Callback):
    """Appends starts and checkpoints of a run to progress.txt in its `--save` folder, in Megatron's form.

    Args:
        flops: floating-point operations of a sample.
    """

    def __init__(self, flops: float) -> None:
        self._flops = flops

    def on_train_begin(self, loop: "Loop") -> None:
        self._args, self._begin, self._samples = loop.args, time.monotonic(), loop.args.consumed_train_samples
        self._append("Starting job")

    def on_save_end(self, iteration: int) -> None:
        args, seconds = self._args, time.monotonic() - self._begin
        rate = (args.consumed_train_samples - self._samples) * self._flops / seconds / args.world_size / 1e12
        self._append(
            f"{'Saving async' if args.async_save else 'Saved'} checkpoint\tIteration: {iteration}\t"
            f"Job throughput: {rate:.1f} TFLOP/s/GPU\t"
            f"Floating-point operations: {args.consumed_train_samples * self._flops:.2e}\t"
            f"Tokens (in billions): {args.consumed_train_tokens / 1e9:.2f}"
        )

    def _append(self, text: str) -> None:
        job = os.environ.get("SLURM_JOB_ID", "")
        line = f"{datetime.now():%Y-%m-%d %H:%M:%S}\tJob ID: {job}\t# GPUs: {self._args.world_size}\t{text}\n"
        with (Path(self._args.save) / "progress.txt").open("a") as file:
            file.write(line)
