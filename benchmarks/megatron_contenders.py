# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's schedule functions, and this package's executor, on the stack.

The stack stands in the place of the GPT: wrapped by Megatron's DistributedDataParallel, stepped by Megatron's
optimizer, run by the `Steps` of a training run.
"""

import argparse
import copy
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.num_microbatches_calculator import reconfigure_num_microbatches_calculator
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.utils import unwrap_model

from benchmarks.contenders import OURS, Factory, Refused, build, looped, pieces_of, straight
from benchmarks.reference import CHECKED_BATCHES
from benchmarks.stack import LEARNING_RATE, MOMENTUM, Cell, mean_square, microbatches
from megatron_async.config import arguments
from megatron_async.mcore.parallel import initialize
from megatron_async.mcore.training import gpt_config_from_args, set_global_variables
from megatron_async.pipeline.delayed import DelayedSteps
from megatron_async.pipeline.executor import Hooks
from megatron_async.pipeline.steps import Steps, Training
from megatron_async.pipeline.synchronous import SynchronousSteps
from megatron_async.pipeline.timeline import Timeline
from megatron_async.schedules import SCHEDULES, schedule_problems
from megatron_async.schedules.phases import Phases

_ENDLESS = 10**9


def factories(cell: Cell) -> Mapping[str, Factory]:
    """Megatron's and this package's schedules by name; starts process groups and Megatron's state for the cell."""
    args = arguments.parse(
        f"""--device cpu --pipeline-model-parallel-size {cell.stages} --num-layers {2 * cell.stages}
        --hidden-size {cell.hidden} --num-attention-heads 4 --seq-length {cell.sequence}
        --max-position-embeddings {cell.sequence} --micro-batch-size {cell.samples}
        --global-batch-size {cell.microbatches * cell.samples} --train-iters {_ENDLESS}
        --lr {LEARNING_RATE} --clip-grad 0 --optimizer sgd --eval-iters 0 --mock-data
        --tokenizer-type NullTokenizer --vocab-size 64""".split()
    )
    set_global_variables(args)
    initialize(args)
    return {
        "megatron-1f1b": partial(MegatronContender, args, "1f1b", None),
        "megatron-interleaved-1f1b": partial(MegatronContender, args, "1f1b", 2),
        **{name: partial(MegatronContender, args, name, None) for name in OURS},
    }


def _forward_step(data: Iterator[Any] | None, model: Any) -> tuple[torch.Tensor, Any]:
    (stage,) = unwrap_model([model])
    sample: Any = (None, None) if data is None else next(data)
    source, target = sample
    return model(source if stage.pre_process else None), partial(_loss, target)


def _loss(target: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    loss = mean_square(output, target)
    return loss, torch.ones((), dtype=torch.int), {"lm loss": loss.detach()}


def _set_shape(microbatches: int, virtual_stages: int | None = None) -> None:
    """Set Megatron's numbers of micro-batches per batch and of virtual stages per rank."""
    reconfigure_num_microbatches_calculator(1, None, microbatches, micro_batch_size=1, data_parallel_size=1)
    mpu.set_virtual_pipeline_model_parallel_world_size(virtual_stages)


class MegatronContender:
    """The steps of a training run on the stack.

    Args:
        args: of the run; the model that they describe is never built.
        schedule: `--pipeline-schedule`.
        virtual_stages: Megatron's, of a rank.

    Raises:
        Refused: the schedule does not run with the cell's number of micro-batches.
    """

    def __init__(
        self, args: argparse.Namespace, schedule: str, virtual_stages: int | None, cell: Cell, rank: int
    ) -> None:
        definition, args = SCHEDULES[schedule], argparse.Namespace(**vars(args) | {"pipeline_schedule": schedule})
        problems = schedule_problems(
            schedule, stages=cell.stages, microbatches=cell.microbatches, batches=CHECKED_BATCHES
        )
        if virtual_stages and cell.microbatches % cell.stages:
            problems.append(f"{cell.microbatches} micro-batches are not a multiple of {cell.stages} stages")
        if problems:
            raise Refused("; ".join(problems))
        place = looped if (virtual_stages or definition.chunks) > 1 else straight
        stages, config = build(cell, place(cell.stages), rank).values(), _config(args, virtual_stages)
        for stage in stages:
            stage.config, stage.model_type = config, ModelType.encoder_or_decoder
        self.pieces, self.unsteady = pieces_of(stages), (0, 0) if definition.megatron else (1, 1)
        self._updates_per_batch = cell.microbatches if definition.update_per_microbatch else 1
        self._last_chunk, self._update, self._completed = definition.chunks - 1, 0, list[float]()
        model = [DistributedDataParallel(config, DistributedDataParallelConfig(), stage) for stage in stages]
        parts = [[chunk] for chunk in model] if definition.chunks > 1 else [model]
        sgd = OptimizerConfig(optimizer="sgd", lr=LEARNING_RATE, weight_decay=0.0, sgd_momentum=MOMENTUM, clip_grad=0.0)
        training = Training(
            args=args,
            model=model,
            optimizers=[get_megatron_optimizer(sgd, part, use_gloo_process_groups=False) for part in parts],
            forward_step=_forward_step,
            data_iterators=[
                microbatches(cell) if stage.pre_process or stage.post_process else None for stage in stages
            ],
            phases=Phases(0, _ENDLESS),
            correction=None,
            statistics=None,
            zeros=None,
            hooks=Hooks(
                losses=lambda batch, losses: None,
                action=lambda kind, batch: None,
                shared=self._complete,
                updated=lambda report: None,
                acted=lambda: None,
            ),
            timeline=Timeline(0),
        )
        self._microbatches = cell.microbatches
        _set_shape(cell.microbatches // self._updates_per_batch, virtual_stages)
        self._steps: Steps = (
            SynchronousSteps(training) if definition.megatron else DelayedSteps(training, newest_version=0)
        )
        _set_shape(cell.microbatches)

    def run(self, batches: int) -> list[float]:
        self._completed.clear()
        end = self._update + batches * self._updates_per_batch
        _set_shape(self._microbatches // self._updates_per_batch)  # steps ask for it, since batches may grow
        while self._update < end:
            self._update += self._steps.run(self._update, end - self._update)
        _set_shape(self._microbatches)
        return list(self._completed)

    def _complete(self, chunk: int, update: int) -> tuple[float, ...]:
        """A synchronous batch is complete after its update. The update of a delayed one comes later."""
        if chunk == self._last_chunk and (update + 1) % self._updates_per_batch == 0:
            self._completed.append(time.monotonic())
        return ()


def _config(args: argparse.Namespace, virtual_stages: int | None) -> Any:
    """Megatron's configuration of a chunk, as a run with so many virtual stages has it."""
    config = copy.copy(gpt_config_from_args(args).transformer)
    if virtual_stages:
        config.virtual_pipeline_model_parallel_size = virtual_stages
        config.overlap_p2p_comm, config.batch_p2p_comm = True, False  # Megatron's defaults with virtual stages
        config.microbatch_group_size_per_vp_stage = args.pipeline_model_parallel_size
    config.grad_scale_func, config.finalize_model_grads_func = None, finalize_model_grads
    return config
