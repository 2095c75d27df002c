# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Python's garbage collector and the GPU allocator's cache by hand."""

import argparse
import gc
from typing import TYPE_CHECKING

import torch

from megatron_async.schedules.arguments import is_delayed
from megatron_async.training.callbacks import Callback, CompletedBatch

if TYPE_CHECKING:
    from megatron_async.training.loop import Loop


class ManualCollection(Callback):
    """Megatron's `--manual-gc`: Python collects at the same batches on every rank, so that none holds the others up.

    Args:
        args: `manual_gc_interval`, batches between two collections, 0 is never; `manual_gc_eval`, whether to collect
            before and after an evaluation too.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._interval, self._around_evaluations = args.manual_gc_interval, args.manual_gc_eval

    def on_train_begin(self, loop: "Loop") -> None:
        gc.disable()

    def on_batch_end(self, batch: CompletedBatch) -> None:
        if self._interval and batch.iteration % self._interval == 0:
            gc.collect()

    def on_evaluation_begin(self, iteration: int) -> None:
        if self._around_evaluations:
            gc.collect()

    def on_evaluation_end(self, iteration: int, loss: float | None) -> None:
        if self._around_evaluations:
            gc.collect(generation=0)

    def on_train_end(self, complete: bool) -> None:
        gc.enable()


class EmptyCache(Callback):
    """Megatron's `--empty-unused-memory-level`: free memory goes back to CUDA after batches and evaluations.

    That waits for the device. With a gradient delay it happens where the pipeline is empty, and not in between.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._after_batches = not is_delayed(args)

    def on_batch_end(self, batch: CompletedBatch) -> None:
        if self._after_batches:
            torch.cuda.empty_cache()

    def on_drain(self) -> None:
        if not self._after_batches:
            torch.cuda.empty_cache()

    def on_evaluation_end(self, iteration: int, loss: float | None) -> None:
        torch.cuda.empty_cache()
