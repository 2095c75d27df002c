# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Values that options ask for, logged with the loss of a batch."""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_async.mcore.parallel import device
from megatron_async.optim import totals
from megatron_async.optim.qk_clip import watches_logits
from megatron_async.platform.groups import group_of_all
from megatron_async.platform.host import Reduced, to_device
from megatron_async.training.callbacks import Callback, CompletedBatch, Pending

if TYPE_CHECKING:
    from megatron_async.training.loop import Trained

_MEMORY = {
    "mem_reserved_bytes": "reserved_bytes.all.current",
    "mem_allocated_bytes": "allocated_bytes.all.current",
    "mem_max_allocated_bytes": "allocated_bytes.all.peak",
    "mem_allocated_count": "allocation.all.current",
}


class Logged(Callback):
    """Logs what `measure` returns for each batch: values by name, values that are still on their way, or nothing."""

    def __init__(self, measure: Callable[[CompletedBatch], Mapping[str, Any] | Pending | None]) -> None:
        self._measure = measure

    def on_batch_end(self, batch: CompletedBatch) -> None:
        found = self._measure(batch)
        if isinstance(found, Mapping):
            batch.values |= found
        elif found is not None:
            batch.pending.append(found)


class PeriodicTimes(Callback):
    """Logs where the time of this rank goes, every `interval` batches.

    Args:
        interval: batches between two of these values.
        reduce: mean seconds of a batch since the last time, by kind (F, B and U) -> the values.
    """

    def __init__(self, interval: int, reduce: Callable[[Mapping[str, float]], Pending]) -> None:
        self._interval, self._reduce, self._batches = interval, reduce, 0
        self._seen: dict[str, float] = dict.fromkeys("FBU", 0.0)

    def on_batch_end(self, batch: CompletedBatch) -> None:
        self._batches += 1
        if batch.iteration % self._interval:
            return
        before, self._seen = self._seen, {kind: self.loop.timeline.seconds[kind] for kind in "FBU"}
        batch.pending.append(self._reduce({kind: (self._seen[kind] - before[kind]) / self._batches for kind in "FBU"}))
        self._batches = 0


def requested(args: argparse.Namespace, trained: "Trained") -> Iterator[Callback]:
    """A callback for each kind of value that the arguments ask for. Collective."""
    if (statistics := trained.statistics) is not None:
        yield Logged(lambda batch: statistics.reduce(batch.number) if statistics.measures(batch.number) else None)
    if watches_logits(args):
        logits = group_of_all("largest logit")
        yield Logged(lambda batch: _largest_logit(batch, logits))
    sums = group_of_all("totals") if args.log_params_norm or trained.zeros is not None else None
    if args.log_params_norm:
        counted = totals.shares(trained.optimizer)
        yield Logged(
            lambda batch: Reduced(
                totals.sum_of_squares(counted, device()), sums, lambda found: {"params_norm": math.sqrt(found[0])}
            )
        )
    if (zeros := trained.zeros) is not None:
        yield Logged(
            lambda batch: Reduced(zeros.take(batch.number), sums, lambda found: {"num_zeros": round(found[0])})
        )
    if args.log_timers_to_tensorboard:
        times = group_of_all("times")
        yield PeriodicTimes(args.log_interval, lambda seconds: _of_slowest(seconds, times))
    if args.log_world_size_to_tensorboard:
        yield Logged(lambda batch: {"world_size": dist.get_world_size()})
    if args.log_memory_to_tensorboard:
        yield Logged(memory)


def memory(batch: CompletedBatch) -> dict[str, int]:
    """The allocator's counters of this rank's GPU."""
    counters = torch.cuda.memory_stats()
    return {name: counters[counter] for name, counter in _MEMORY.items()}


def _largest_logit(batch: CompletedBatch, group: dist.ProcessGroup | None) -> Pending | None:
    """`max_attention_logit` over all ranks, before QK-clip."""
    parts = [report.logits.flatten() for report in batch.reports if report.logits is not None]
    if not parts:
        return None
    lowest = parts[0].new_full((1,), -math.inf)  # for a rank without softmax attention
    largest = torch.cat([lowest, *parts]).max().view(1)
    return Reduced(largest, group, lambda found: {"max_attention_logit": found[0]}, dist.ReduceOp.MAX)


def _of_slowest(seconds: Mapping[str, float], group: dist.ProcessGroup | None) -> Pending:
    """Milliseconds of forwards, backwards and update, each of the rank that takes longest."""
    names = ("forward_ms", "backward_ms", "update_ms")
    return Reduced(
        to_device([1000 * seconds[kind] for kind in "FBU"], device()),
        group,
        lambda slowest: dict(zip(names, slowest, strict=True)),
        dist.ReduceOp.MAX,
    )
