# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Delayed batches: segments of a schedule through the executor."""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from megatron.core import mpu
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.pipeline_parallel.schedules import get_tensor_shapes
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from megatron_async.mcore.optimizer import flat_parts, mark_delay
from megatron_async.mcore.parallel import device
from megatron_async.pipeline.accumulators import Accumulators
from megatron_async.pipeline.decision import UpdateRule
from megatron_async.pipeline.executor import Chunk, Executor, MicrobatchStep
from megatron_async.pipeline.gradients import GENERATIONS, GradientGenerations
from megatron_async.pipeline.links import Message, connect
from megatron_async.pipeline.pointers import pointers
from megatron_async.pipeline.router_bias import RouterBiases
from megatron_async.pipeline.steps import History, Training
from megatron_async.pipeline.update import DeferredUpdate, Launch
from megatron_async.pipeline.weights import WeightVersions
from megatron_async.platform.groups import make_communicators
from megatron_async.platform.host import Pace
from megatron_async.schedules import SCHEDULES, ScheduleDefinition

LAUNCHES = {"at-update": Launch.AT_UPDATE, "when-known": Launch.WHEN_KNOWN, "at-once": Launch.AT_ONCE}
"""Values of `--update-launch`, besides "auto"."""


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
        self.delays = self._schedule.delays(self._stages, self._stage)
        self.chunks = [
            _make_chunk(training, self._schedule, index, delay, newest_version)
            for index, delay in enumerate(self.delays)
        ]
        self._links = connect(
            dist.get_process_group_ranks(groups.pp),
            self._stage,
            activations(args, get_model_config(training.model[0])),
            sends_in_flight=self._schedule.untaken_sends(self._stages),
            ring=self._schedule.chunks > 1,
        )
        make_communicators(_groups_of_updates())
        self._cold = True
        self._training, self._context = training, groups.cp.size()
        self._executor = Executor(
            chunks=self.chunks,
            step=self._step(),
            links=self._links,
            hooks=training.hooks,
            timeline=training.timeline,
            # A host that polls must not run ahead of what it polls.
            pace=Pace() if device().type == "cuda" and launch_of(args) is not Launch.AT_ONCE else None,
        )

    @property
    def histories(self) -> Sequence[History]:
        return [chunk.weights for chunk in self.chunks]

    def _step(self) -> MicrobatchStep:
        return MicrobatchStep(self._training.forward_step, get_num_microbatches(), self._context)

    def skip(self, batch: int) -> None:
        self._training.read_past()
        for chunk in self.chunks:
            chunk.weights.open_next()
            chunk.weights.publish_next(batch + 1)

    def run(self, first_batch: int, batches: int) -> int:
        self._executor.step = self._step()
        # The first batch compiles kernels and allocates: it is a segment of its own, with receives posted at their use.
        cold, self._cold = self._cold, False
        self._links.post_ahead(not cold and self._schedule.posts_ahead(self._stages))
        for chunk in self.chunks:
            chunk.update.all_at_update = cold
        end = first_batch + 1 if cold else self._phases.end_of_segment(first_batch, first_batch + batches)
        done = self._executor.run(
            lambda count: self._schedule.plan(
                stages=self._stages,
                stage=self._stage,
                microbatches=self._executor.step.microbatches,
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


def _make_chunk(training: Training, schedule: ScheduleDefinition, index: int, delay: int, newest_version: int) -> Chunk:
    args, module, optimizer = training.args, training.model[index], training.optimizers[index]
    for param in module.parameters():
        mark_delay(param, delay)
    for shard, _, _ in flat_parts(optimizer):
        shard.gradient_delay = delay  # type: ignore[attr-defined]
    weights = WeightVersions(pointers(module, optimizer), limit=delay + 1, newest=newest_version)
    counted = mpu.get_tensor_and_data_parallel_group(with_context_parallel=True)
    accumulators = Accumulators(
        GradientGenerations(module, GENERATIONS if delay else 1),
        RouterBiases(module, counted, args.moe_router_bias_update_rate),
        training.logit_maxima([module]),
    )
    return Chunk(
        module=module,
        data_iterator=training.data_iterators[index],
        first=get_attr_wrapped_model(module, "pre_process"),
        last=get_attr_wrapped_model(module, "post_process"),
        weights=weights,
        accumulators=accumulators,
        update=DeferredUpdate(
            index=index,
            chunk=module,
            optimizer=optimizer,
            weights=weights,
            accumulators=accumulators,
            master_step=training.master_step([module], optimizer),
            corrected=training.corrected,
            rule=UpdateRule(
                clip_grad=args.clip_grad,
                per_token=args.calculate_per_token_loss,
                stage_norm=schedule.norm_scope == "stage",
                lag=args.pipeline_model_parallel_size if schedule.norm_scope == "stage" else 0,
            ),
            launch=launch_of(args),
        ),
    )


def launch_of(args: argparse.Namespace) -> Launch:
    """When the host launches the parts of an update; "auto" by the device."""
    if args.update_launch == "auto":
        return Launch.WHEN_KNOWN if device().type == "cuda" else Launch.AT_UPDATE
    return LAUNCHES[args.update_launch]


def _groups_of_updates() -> Iterator[dist.ProcessGroup | None]:
    """Megatron's groups in which updates reduce, kind by kind."""
    yield mpu.get_tensor_and_data_parallel_group(with_context_parallel=True)
    yield mpu.get_data_parallel_group(with_context_parallel=True)
    yield mpu.get_expert_data_parallel_group()
    embedding = mpu.get_embedding_group(check_initialized=False)
    yield embedding if isinstance(embedding, dist.ProcessGroup) and dist.get_rank(embedding) >= 0 else None


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
