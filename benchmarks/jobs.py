# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Jobs of a rank of a training run. Each takes the command line of `megatron_async.pretrain`."""

import time
from collections.abc import Sequence

import torch
from megatron.core import mpu
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.pipeline_parallel.schedules import backward_step, deallocate_output_tensor, forward_step
from megatron.core.utils import get_model_config

from megatron_async.config import arguments
from megatron_async.pipeline.delayed import activations
from megatron_async.training import run
from megatron_async.training.callbacks import Callback, CompletedBatch
from megatron_async.training.loop import Loop
from megatron_async.training.signals import StopRequests

Batch = tuple[float, float, float, float]
"""Milliseconds of a batch, and of all its forwards, all its backwards and its update on this rank."""


class Times(Callback):
    """Milliseconds of each batch, and of each stop of the pipeline for a checkpoint."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._save_began = 0.0
        self.stops: list[float] = []

    def on_train_begin(self, loop: Loop) -> None:
        self._timeline = loop.timeline

    def on_batch_end(self, batch: CompletedBatch) -> None:
        self._seconds.append(batch.seconds)

    def on_save_begin(self, iteration: int) -> None:
        self._save_began = time.perf_counter()

    def on_save_end(self, iteration: int) -> None:
        self.stops.append(1e3 * (time.perf_counter() - self._save_began))

    def batches(self) -> list[Batch]:
        """The batches of a run with a trace file that holds all of them."""
        parts = [dict.fromkeys("FBU", 0.0) for _ in self._seconds]
        for span in self._timeline.kept():
            parts[span.labels["batch"]][span.kind] += 1e3 * span.duration
        return [(1e3 * time, part["F"], part["B"], part["U"]) for time, part in zip(self._seconds, parts, strict=True)]


def train(line: Sequence[str]) -> tuple[list[Batch], list[float]]:
    """Train; return its batches, and the milliseconds of each stop for a checkpoint."""
    times = Times()
    run.pretrain(arguments.parse(line), StopRequests(), [times])
    return times.batches(), times.stops


def alone(line: Sequence[str]) -> tuple[list[Batch], list[float]]:
    """Run this rank's stage without communication, on made-up inputs; as `train`, without stops."""
    loop = run.build(arguments.parse(line))
    loop.model[0].train()
    batches = [_batch_alone(loop) for _ in range(loop.args.train_iters)]
    loop.end()
    run.close()
    return batches, []


def _batch_alone(loop: Loop) -> Batch:
    (module,), config = loop.model, get_model_config(loop.model[0])
    first, last = mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage()
    shape, microbatches = activations(loop.args, config).shape, get_num_microbatches()
    generator, forwards, backwards = torch.Generator().manual_seed(1), 0.0, 0.0
    module.zero_grad_buffer()
    for _ in range(microbatches):
        # Tokens that differ, for the routers.
        source = None if first else torch.randn(shape, generator=generator).requires_grad_()
        gradient = None if last else torch.full(shape, 1e-3)
        start = time.perf_counter()
        output, _ = forward_step(
            loop.forward_step, loop.train_data, module, microbatches, source, [], config, 1, is_last_stage=last
        )
        forwarded = time.perf_counter()
        deallocate_output_tensor(output, config.deallocate_pipeline_outputs)
        backward_step(source, output, gradient, config)
        forwards += 1e3 * (forwarded - start)
        backwards += 1e3 * (time.perf_counter() - forwarded)
    start = time.perf_counter()
    loop.optimizer.prepare_grads()
    loop.optimizer.step_with_ready_grads()
    update = 1e3 * (time.perf_counter() - start)
    return forwards + backwards + update, forwards, backwards, update
