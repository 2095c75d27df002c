# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Two ways to run batches: Megatron-Core's own synchronous step, and segments of a delayed schedule."""

import argparse
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.schedules import get_tensor_shapes
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from megatron_async.checkpoint.state import History
from megatron_async.mcore.optimizer import mark_delay, shards_of, step_unless_not_finite
from megatron_async.mcore.parallel import device
from megatron_async.mcore.step import timed_schedule
from megatron_async.optim.corrections import Correction
from megatron_async.optim.qk_clip import ClipRule, QkClip, watches_logits
from megatron_async.pipeline.executor import Chunk, Executor, Hooks, MicrobatchStep
from megatron_async.pipeline.gradients import GradientGenerations
from megatron_async.pipeline.links import Message, connect
from megatron_async.pipeline.logits import LogitMaxima
from megatron_async.pipeline.pointers import pointers
from megatron_async.pipeline.router_bias import RouterBiases
from megatron_async.pipeline.timeline import Timeline
from megatron_async.pipeline.update import DeferredUpdate, UpdateReport, UpdateRule
from megatron_async.pipeline.weights import WeightVersions
from megatron_async.reference import fresh
from megatron_async.reference.ablations import DelayedFirstMoment
from megatron_async.reference.delay import Oracle
from megatron_async.schedules import SCHEDULES
from megatron_async.training.phases import Phases


class Steps(Protocol):
    """Runs consecutive batches and leaves the newest weights in use."""

    @property
    def histories(self) -> Sequence[History]:
        """Older weights that coming batches need, for each model chunk; none in a synchronous run."""

    def run(self, first_batch: int, batches: int) -> int:
        """Run up to `batches` batches; return how many were run."""


@dataclass(frozen=True, slots=True)
class Training:
    """What both ways to run batches are made of.

    Attributes:
        model: this rank's wrapped model chunks.
        optimizers: Megatron's optimizer of each chunk; one for all of them in a synchronous run.
        forward_step: Megatron's forward step function.
        data_iterators: micro-batches for each chunk, None where a chunk needs no data.
    """

    args: argparse.Namespace
    model: list[Any]
    optimizers: list[MegatronOptimizer]
    forward_step: Any
    data_iterators: Sequence[Any]
    phases: Phases
    hooks: Hooks
    timeline: Timeline


class MegatronSteps:
    """Megatron's schedule function and optimizer step, batch by batch.

    Args:
        oracle: takes gradients at older weights, the emulated delay; None for a synchronous run.
        first_moments: with an oracle, optimizers whose second moments get fresh gradients.
        correction: of the optimizer's steps.
        staleness: with an oracle, receives now and then how stale the update of a batch is.
    """

    def __init__(
        self,
        training: Training,
        oracle: Oracle | None,
        first_moments: Sequence[DelayedFirstMoment] = (),
        *,
        correction: Correction | None = None,
        staleness: Callable[[int, Mapping[str, float]], None] | None = None,
    ) -> None:
        self._training, self._oracle = training, oracle
        self._correction, self._report_staleness = correction, staleness
        (self._optimizer,) = training.optimizers
        self._forward_backward = get_forward_backward_func()
        self._replays = [fresh.Replay(iterator) for iterator in training.data_iterators] if oracle else []
        self._adams = list(first_moments)
        self._biases = oracle.biases() if oracle else [_router_biases(training.model)]
        self._logits = _logits(training.args, training.model)
        self._clip = _clip(training.args, training.model, self._optimizer)

    @property
    def histories(self) -> Sequence[History]:
        return [self._oracle] if self._oracle else []

    def run(self, first_batch: int, batches: int) -> int:
        for batch in range(first_batch, first_batch + batches):
            stop_after = self._step(batch)
            if stop_after is not None and stop_after < first_batch + batches - 1:
                return batch + 1 - first_batch
        return batches

    def _step(self, batch: int) -> int | None:
        training = self._training
        oracle = None if training.phases.synchronous(batch) else self._oracle
        measures = oracle is not None and self._measures(batch)
        newest = self._fresh_gradients(batch) if oracle and (measures or self._adams) else {}
        self._clear_gradients()
        biases = [[bias.clone() for bias in group] for group in self._biases]
        training.hooks.computes(batch)
        with oracle.stale() if oracle else contextlib.nullcontext():
            losses = self._forward_and_backward(batch)
        for replay in self._replays:
            replay.forget()
        if losses:
            training.hooks.losses(batch, losses)
        if measures and self._report_staleness is not None:
            stale = fresh.clipped(self._optimizer, training.args.clip_grad)
            self._report_staleness(batch, fresh.staleness(self._optimizer, self._correction, stale, newest))
        training.hooks.before_update(0, batch)
        for adam in self._adams:
            adam.fresh = newest
        logits = self._largest_logits(batch)
        with training.timeline.span("U", batch=batch, version=batch + 1, chunk=0), self._clipped_by(logits):
            groups = self._oracle.norm_groups(self._optimizer) if self._oracle else None
            skipped, grad_norm = step_unless_not_finite(self._optimizer, groups)
            self._put_back(biases, skipped)
        if oracle:
            oracle.record()
        elif self._oracle:
            self._oracle.restart()
        shared = torch.tensor(training.hooks.shared(0, batch), dtype=torch.float64, device=device())
        dist.all_reduce(shared)
        return training.hooks.updated(UpdateReport(0, batch, grad_norm, any(skipped), tuple(shared.tolist()), logits))

    def _put_back(self, biases: Sequence[Sequence[torch.Tensor]], skipped: Sequence[bool]) -> None:
        """Undo what Megatron has moved at the end of the backward passes, where there is no update to go with it."""
        for group, before, skip in zip(self._biases, biases, skipped, strict=True):
            if skip:
                for bias, value in zip(group, before, strict=True):
                    bias.copy_(value)

    def _largest_logits(self, batch: int) -> torch.Tensor | None:
        if self._logits is None:
            return None
        if (work := self._logits.reduce(batch)) is not None:
            work.wait()
        return self._logits.take(batch)

    def _clipped_by(self, logits: torch.Tensor | None) -> contextlib.AbstractContextManager[None]:
        return self._clip.by(logits) if self._clip and logits is not None else contextlib.nullcontext()

    def _measures(self, batch: int) -> bool:
        interval = self._training.args.log_update_statistics
        return interval > 0 and (batch + 1) % interval == 0

    def _clear_gradients(self) -> None:
        for chunk in self._training.model:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    def _fresh_gradients(self, batch: int) -> fresh.Gradients:
        """The clipped gradients of a batch at the newest weights; the batch is read again afterwards."""
        self._clear_gradients()
        with fresh.same_random_state():
            self._forward_and_backward(batch)
        gradients = fresh.clipped(self._optimizer, self._training.args.clip_grad)
        for replay in self._replays:
            replay.rewind()
        if self._logits is not None:
            self._logits.forget(batch)
        return gradients

    def _forward_and_backward(self, batch: int) -> list[dict[str, torch.Tensor]]:
        training = self._training
        iterators = self._replays or list(training.data_iterators)
        if self._logits is not None:
            self._logits.use(batch)
        with timed_schedule(training.timeline, batch, get_num_microbatches()):
            return self._forward_backward(
                forward_step_func=training.forward_step,
                data_iterator=iterators if len(training.model) > 1 else iterators[0],
                model=training.model,
                num_microbatches=get_num_microbatches(),
                seq_length=training.args.seq_length,
                micro_batch_size=training.args.micro_batch_size,
                decoder_seq_length=training.args.decoder_seq_length,
                forward_only=False,
            )


def _router_biases(model: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    """Buffers that Megatron moves once for each batch to balance the experts."""
    names = (".expert_bias", ".qb_beta")
    return [buffer for chunk in model for name, buffer in chunk.named_buffers() if name.endswith(names)]


class DelayedSteps:
    """Segments of a delayed schedule through the executor; a synchronous batch is a segment of its own.

    Args:
        newest_version: number of updates that the weights have had.
    """

    def __init__(self, training: Training, *, newest_version: int) -> None:
        args, self._phases = training.args, training.phases
        groups = ProcessGroupCollection.use_mpu_process_groups()
        self._stage, self._stages = groups.pp.rank(), groups.pp.size()
        self._schedule = SCHEDULES[args.pipeline_schedule]
        self._microbatches = get_num_microbatches()
        self.delays = chunk_delays(args.pipeline_schedule, stage=self._stage, stages=self._stages)
        self.chunks = [_make_chunk(training, index, delay, newest_version) for index, delay in enumerate(self.delays)]
        self._executor = Executor(
            chunks=self.chunks,
            step=MicrobatchStep(training.forward_step, self._microbatches, groups.cp.size()),
            links=connect(
                torch.distributed.get_process_group_ranks(groups.pp),
                self._stage,
                activations(args, get_model_config(training.model[0])),
                sends_in_flight=self._schedule.untaken_sends(self._stages),
                timeout=timedelta(minutes=args.distributed_timeout_minutes),
            ),
            hooks=training.hooks,
            timeline=training.timeline,
        )

    @property
    def histories(self) -> Sequence[History]:
        return [chunk.weights for chunk in self.chunks]

    def run(self, first_batch: int, batches: int) -> int:
        end = self._phases.end_of_segment(first_batch, first_batch + batches)
        done = self._executor.run(
            lambda count: self._schedule.stage_actions(
                stages=self._stages,
                stage=self._stage,
                microbatches=self._microbatches,
                batches=count,
                first_batch=first_batch,
                versions=self._phases.versions(self.delays[0]),
            ),
            first_batch=first_batch,
            batches=end - first_batch,
        )
        for chunk in self.chunks:
            chunk.weights.use(chunk.weights.newest)
        return done


def chunk_delays(schedule: str, *, stage: int, stages: int) -> list[int]:
    """Gradient delay, in updates, of each chunk that a rank holds."""
    return [limit - 1 for limit in SCHEDULES[schedule].version_limits(stages, stage)]


def _make_chunk(training: Training, index: int, delay: int, newest_version: int) -> Chunk:
    args, module, optimizer = training.args, training.model[index], training.optimizers[index]
    for param in module.parameters():
        mark_delay(param, delay)
    for shard, _ in shards_of(optimizer):
        shard.gradient_delay = delay  # type: ignore[attr-defined]
    weights = WeightVersions(pointers(module, optimizer), limit=delay + 1, newest=newest_version)
    gradients = GradientGenerations(module)
    routers = RouterBiases(
        module,
        mpu.get_tensor_and_data_parallel_group(with_context_parallel=True),
        args.moe_router_bias_update_rate,
    )
    logits, clip = _logits(args, [module]), _clip(args, [module], optimizer)
    return Chunk(
        module=module,
        data_iterator=training.data_iterators[index],
        first=get_attr_wrapped_model(module, "pre_process"),
        last=get_attr_wrapped_model(module, "post_process"),
        weights=weights,
        gradients=gradients,
        routers=routers,
        logits=logits,
        update=DeferredUpdate(
            index=index,
            chunk=module,
            optimizer=optimizer,
            weights=weights,
            gradients=gradients,
            routers=routers,
            logits=logits,
            clip_by=clip.by if clip is not None else None,
            rule=UpdateRule(
                clip_grad=args.clip_grad,
                per_token=args.calculate_per_token_loss,
                stage_norm=args.pipeline_schedule == "pipedream",
                lag=args.pipeline_model_parallel_size if args.pipeline_schedule == "pipedream" else 0,
            ),
        ),
    )


def _logits(args: argparse.Namespace, chunks: Sequence[Any]) -> LogitMaxima | None:
    if not watches_logits(args):
        return None
    return LogitMaxima(chunks, mpu.get_data_parallel_group(with_context_parallel=True))


def _clip(args: argparse.Namespace, chunks: Sequence[Any], optimizer: MegatronOptimizer) -> QkClip | None:
    if not args.qk_clip:
        return None
    return QkClip(chunks, optimizer, ClipRule(args.qk_clip_threshold, args.qk_clip_alpha))


def activations(args: argparse.Namespace, config: Any) -> Message:
    """What stages pass on: the activations of one micro-batch."""
    groups = ProcessGroupCollection.use_mpu_process_groups()
    (shape,) = get_tensor_shapes(
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        decoder_seq_length=None,
        config=config,
        tp_group=groups.tp,
        cp_group=groups.cp,
    )
    return Message(tuple(shape), config.pipeline_dtype, device())
