# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Jobs of a rank of a training run. Each takes the command line of `megatron_async.pretrain`."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.pipeline_parallel.schedules import backward_step, deallocate_output_tensor, forward_step
from megatron.core.utils import get_model_config

from megatron_async.config import arguments
from megatron_async.pipeline.delayed import activations
from megatron_async.pipeline.timeline import Timeline
from megatron_async.training import run
from megatron_async.training.callbacks import Callback, CompletedBatch
from megatron_async.training.loop import Loop
from megatron_async.training.signals import StopRequests

Batch = tuple[float, ...]
"""Milliseconds of a batch, and of all its forwards, all its backwards and its update on this rank."""


class Times(Callback):
    """Milliseconds of each batch, and of each stop of the pipeline for a checkpoint."""

    def __init__(self) -> None:
        self.batches: list[float] = []
        self.stops: list[float] = []

    def on_train_begin(self, loop: Loop) -> None:
        self.timeline = loop.timeline

    def on_batch_end(self, batch: CompletedBatch) -> None:
        self.batches.append(1e3 * batch.seconds)

    def on_save_begin(self, iteration: int) -> None:
        self.stops.append(-1e3 * time.perf_counter())

    def on_save_end(self, iteration: int) -> None:
        self.stops[-1] += 1e3 * time.perf_counter()


def train(line: Sequence[str]) -> tuple[list[Batch], list[float]]:
    """Train, with a trace of all batches; return them, and the milliseconds of each stop for a checkpoint."""
    times = Times()
    run.pretrain(arguments.parse(line), StopRequests(), [times])
    parts = _parts(times.timeline, len(times.batches))
    return [(batch, *part) for batch, part in zip(times.batches, parts, strict=True)], times.stops


def alone(line: Sequence[str]) -> tuple[list[Batch], list[float]]:
    """Run this rank's stage without communication, on made-up inputs; as `train`, without stops."""
    loop = run.build(arguments.parse(line))
    loop.model[0].train()
    count = loop.args.train_iters
    timeline = Timeline(keep_batches=count)
    for batch in range(count):
        _run_alone(loop, partial(timeline.span, batch=batch))
    loop.end()
    run.close()
    return [(sum(part), *part) for part in _parts(timeline, count)], []


def _parts(timeline: Timeline, batches: int) -> list[tuple[float, ...]]:
    """Milliseconds of all forwards, all backwards and the update of each batch."""
    torch.cuda.synchronize()  # nothing on CPUs
    timeline.busy_since_last()  # takes up the spans of a GPU
    parts = [dict.fromkeys("FBU", 0.0) for _ in range(batches)]
    for span in timeline.kept():
        parts[span.labels["batch"]][span.kind] += 1e3 * span.duration
    return [tuple(part.values()) for part in parts]


def _run_alone(loop: Loop, span: Callable[[str], AbstractContextManager[None]]) -> None:
    """One batch: forwards, backwards and the update."""
    (module,), config = loop.model, get_model_config(loop.model[0])
    first, last = mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage()
    message, microbatches = activations(loop.args, config), get_num_microbatches()
    place: dict[str, Any] = {"dtype": message.dtype, "device": message.device}
    generator = torch.Generator(message.device).manual_seed(1)
    module.zero_grad_buffer()
    for _ in range(microbatches):
        # Tokens that differ, for the routers.
        source = None if first else torch.randn(message.shape, generator=generator, **place).requires_grad_()
        gradient = None if last else torch.full(message.shape, 1e-3, **place)
        with span("F"):
            output, _ = forward_step(
                loop.forward_step, loop.data.train[0], module, microbatches, source, [], config, 1, is_last_stage=last
            )
        with span("B"):
            deallocate_output_tensor(output, config.deallocate_pipeline_outputs)
            backward_step(source, output, gradient, config)
    with span("U"):
        loop.optimizer.prepare_grads()
        loop.optimizer.step_with_ready_grads()
