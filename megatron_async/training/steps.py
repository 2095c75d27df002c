# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Two ways to run batches: Megatron-Core's own synchronous step, and a segment of a delayed schedule."""

import argparse
import contextlib
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_async import megatron
from megatron_async.checkpoint.state import History
from megatron_async.optim.oracle import DelayedWeights
from megatron_async.pipeline.executor import Compute, Executor, Hooks
from megatron_async.pipeline.gradients import GradientGenerations
from megatron_async.pipeline.links import Message, connect
from megatron_async.pipeline.timeline import Timeline
from megatron_async.pipeline.update import DeferredUpdate, UpdateReport
from megatron_async.pipeline.weights import WeightVersions
from megatron_async.schedules import two_bw
from megatron_async.training.phases import Phases


class Steps(Protocol):
    """Runs consecutive batches and leaves the newest weights in use."""

    @property
    def histories(self) -> Sequence[History]:
        """Older weights that coming batches need, for each model chunk; none in a synchronous run."""

    def run(self, first_batch: int, batches: int) -> int:
        """Run up to `batches` batches; return how many were run."""


class MegatronSteps:
    """Megatron's schedule function and optimizer step, batch by batch.

    With an oracle, gradients are taken at older weights: the emulated delay.

    Args:
        oracle: delayed weights, or None for a synchronous run.
    """

    def __init__(
        self,
        *,
        args: argparse.Namespace,
        model: list[Any],
        optimizer: megatron.MegatronOptimizer,
        forward_step: Any,
        data_iterator: Any,
        phases: Phases,
        oracle: DelayedWeights | None,
        hooks: Hooks,
        timeline: Timeline,
    ) -> None:
        self._args, self._model, self._optimizer = args, model, optimizer
        self._forward_step, self._data_iterator = forward_step, data_iterator
        self._phases, self._oracle, self._hooks, self._timeline = phases, oracle, hooks, timeline
        self._forward_backward = megatron.get_forward_backward_func()

    @property
    def histories(self) -> Sequence[History]:
        return [self._oracle] * len(self._model) if self._oracle else []

    def run(self, first_batch: int, batches: int) -> int:
        for batch in range(first_batch, first_batch + batches):
            stop_after = self._step(batch)
            if stop_after is not None and stop_after < first_batch + batches - 1:
                return batch + 1 - first_batch
        return batches

    def _step(self, batch: int) -> int | None:
        delayed = self._oracle is not None and not self._phases.synchronous(batch)
        for chunk in self._model:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        with self._oracle.stale() if delayed and self._oracle else contextlib.nullcontext():
            with megatron.timed_schedule(self._timeline, batch, megatron.get_num_microbatches()):
                losses = self._forward_backward(
                    forward_step_func=self._forward_step,
                    data_iterator=self._data_iterator,
                    model=self._model,
                    num_microbatches=megatron.get_num_microbatches(),
                    seq_length=self._args.seq_length,
                    micro_batch_size=self._args.micro_batch_size,
                    decoder_seq_length=self._args.decoder_seq_length,
                    forward_only=False,
                )
        if losses:
            self._hooks.losses(batch, losses)
        self._hooks.before_update(batch)
        with self._timeline.span("U", batch=batch, version=batch + 1):
            skipped, grad_norm = megatron.step_unless_not_finite(self._optimizer)
        if self._oracle is not None:
            self._oracle.record() if delayed else self._oracle.restart()
        shared = torch.tensor(self._hooks.shared(batch), dtype=torch.float64, device=megatron.device())
        dist.all_reduce(shared)
        return self._hooks.updated(UpdateReport(batch, grad_norm, skipped, tuple(shared.tolist())))


class DelayedSteps:
    """Segments of a delayed schedule through the executor; a synchronous batch is a segment of its own."""

    def __init__(
        self,
        *,
        args: argparse.Namespace,
        model: list[Any],
        optimizer: megatron.MegatronOptimizer,
        forward_step: Any,
        data_iterator: Any,
        phases: Phases,
        hooks: Hooks,
        timeline: Timeline,
        newest_version: int,
    ) -> None:
        (chunk,) = model
        groups = megatron.ProcessGroupCollection.use_mpu_process_groups()
        stage, stages = groups.pp.rank(), groups.pp.size()
        config = megatron.get_model_config(chunk)
        (shape,) = megatron.get_tensor_shapes(
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            decoder_seq_length=None,
            config=config,
            tp_group=groups.tp,
            cp_group=groups.cp,
        )
        microbatches = megatron.get_num_microbatches()
        self.weights = WeightVersions(chunk.parameters(), newest=newest_version)
        gradients = GradientGenerations(chunk)
        self._phases = phases
        self._plan = partial(
            two_bw.stage_actions,
            stages=stages,
            stage=stage,
            microbatches=microbatches,
            versions=phases.versions,
        )
        self._executor = Executor(
            compute=Compute(
                chunk=chunk,
                forward_step=forward_step,
                data_iterator=data_iterator,
                microbatches=microbatches,
                context_parallel_size=groups.cp.size(),
                last_stage=stage == stages - 1,
            ),
            links=connect(
                torch.distributed.get_process_group_ranks(groups.pp),
                stage,
                Message(tuple(shape), config.pipeline_dtype, megatron.device()),
                timedelta(minutes=args.distributed_timeout_minutes),
            ),
            weights=self.weights,
            gradients=gradients,
            update=DeferredUpdate(
                chunk=chunk,
                optimizer=optimizer,
                weights=self.weights,
                gradients=gradients,
                clip_grad=args.clip_grad,
            ),
            hooks=hooks,
            timeline=timeline,
        )

    @property
    def histories(self) -> Sequence[History]:
        return [self.weights]

    def run(self, first_batch: int, batches: int) -> int:
        end = self._phases.end_of_phase(first_batch, first_batch + batches)
        done = self._executor.run(
            lambda count: self._plan(first_batch=first_batch, batches=count),
            first_batch=first_batch,
            batches=min(end - first_batch, batches),
        )
        self.weights.use(self.weights.newest)
        return done
