# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Jobs of a rank for tools/check_splits.py."""

import time
from collections.abc import Sequence

from megatron_async.config import arguments
from megatron_async.planning import measure
from megatron_async.planning.timing import BlockTime
from megatron_async.training import run
from megatron_async.training.callbacks import Callback, CompletedBatch
from megatron_async.training.loop import Loop


class _ProcessorTime(Callback):
    """Milliseconds that the thread of a rank computed in each batch. It sleeps while it waits for others."""

    def __init__(self) -> None:
        self.batches: list[float] = []

    def on_train_begin(self, loop: Loop) -> None:
        self._last = time.thread_time()

    def on_batch_end(self, batch: CompletedBatch) -> None:
        now = time.thread_time()
        self.batches.append(1e3 * (now - self._last))
        self._last = now


def train(line: Sequence[str]) -> tuple[str, list[float]]:
    """Train; the layout, and milliseconds of processor time of this rank in each batch."""
    args, times = arguments.parse(line), _ProcessorTime()
    run.build(args, callbacks=[times]).run()
    run.close()
    return str(args.pipeline_model_parallel_layout), times.batches


def block_times(line: Sequence[str], seconds: float) -> list[BlockTime]:
    """Job for one process: the times of each block of the model, timed alone."""
    return measure.block_times(arguments.parse([*line, "--dry-run"]), seconds)
