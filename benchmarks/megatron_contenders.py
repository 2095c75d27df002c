# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's schedule functions, and this package's executor, on the stack.

The stack stands in the place of the GPT: wrapped by Megatron's DistributedDataParallel, stepped by Megatron's
optimizer, run by the `Steps` of a training run.
"""

import argparse
import copy
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.num_microbatches_calculator import get_num_microbatches, reconfigure_num_microbatches_calculator
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.utils import unwrap_model

from benchmarks.contenders import OURS, Factory, Placement, Refused
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
from megatron_async.pipeline.update import UpdateReport
from megatron_async.schedules import schedule_of, schedule_problems
from megatron_async.schedules.phases import Phases

_ENDLESS = 10**9


def factories(cell: Cell) -> Mapping[str, Factory]:
    """Megatron's and this package's schedules by name; starts process groups and Megatron's state for the cell."""
    args = arguments.parse(
        f"""--device cpu --pipeline-model-parallel-size {cell.stages} --num-layers {2 * cell.stages}
        --hidden-size {cell.hidden} --num-attention-heads 4 --seq-length {cell.sequence}
        --max-position-embeddings {cell.sequence} --micro-batch-size {cell.samples}
        --global-batch-size {cell.microbatches * cell.samples} --train-iters {_ENDLESS}
        --optimizer sgd --sgd-momentum {MOMENTUM} --lr {LEARNING_RATE} --weight-decay 0 --clip-grad 0
        --tokenizer-type NullTokenizer --vocab-size 64 --mock-data --eval-iters 0""".split()
    )
    set_global_variables(args)
    initialize(args)
    return {
        "megatron-1f1b": partial(MegatronContender, args, "1f1b", 1),
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


def _data_parallel(stage: torch.nn.Module, args: argparse.Namespace) -> DistributedDataParallel:
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=args.use_distributed_optimizer)
    return DistributedDataParallel(config=stage.config, ddp_config=ddp_config, module=stage)


def _optimizer(chunks: list[Any], args: argparse.Namespace) -> MegatronOptimizer:
    config = OptimizerConfig(
        optimizer=args.optimizer,
        lr=args.lr,
        weight_decay=args.weight_decay,
        sgd_momentum=args.sgd_momentum,
        clip_grad=args.clip_grad,
    )
    return get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)


@contextmanager
def _schedule_shape(*, microbatches: int, virtual_stages: int | None) -> Iterator[None]:
    """Temporarily override the number of micro-batches and of virtual pipeline stages."""
    before = get_num_microbatches()

    def set_shape(microbatches: int, virtual_stages: int | None) -> None:
        reconfigure_num_microbatches_calculator(
            rank=1, global_batch_size=microbatches, micro_batch_size=1, data_parallel_size=1
        )
        mpu.set_virtual_pipeline_model_parallel_world_size(virtual_stages)

    set_shape(microbatches, virtual_stages)
    try:
        yield
    finally:
        set_shape(before, None)


class MegatronContender:
    """The steps of a training run on the stack.

    Args:
        args: of the run; the model that they describe is never built.
        schedule: `--pipeline-schedule`.
        chunks: virtual stages of a rank; None for those of the schedule.

    Raises:
        Refused: the schedule does not run with the cell's number of micro-batches.
    """

    def __init__(self, args: argparse.Namespace, schedule: str, chunks: int | None, cell: Cell, rank: int) -> None:
        args = argparse.Namespace(**vars(args) | {"pipeline_schedule": schedule})
        definition = schedule_of(args)
        _check(schedule, chunks, cell)
        chunks = chunks or definition.chunks
        placement = (Placement.looped if chunks > 1 else Placement.straight)(cell.stages)
        config = _config(args, chunks if definition.megatron else 1)
        stages = {
            index: placement.build(cell, rank, index, config=config, model_type=ModelType.encoder_or_decoder)
            for index in placement.of_rank(rank)
        }
        self.pieces = placement.pieces(stages)
        self.unsteady = (0, 0) if definition.megatron else (1, 1)
        self._updates_per_batch = cell.microbatches if definition.update_per_microbatch else 1
        self._synchronous, self._last_chunk, self._update = definition.megatron, chunks - 1, 0
        self._completed: list[float] = []
        model = [_data_parallel(stage, args) for stage in stages.values()]
        parts = [[chunk] for chunk in model] if definition.chunks > 1 else [model]
        data = [microbatches(cell) if stage.pre_process or stage.post_process else None for stage in stages.values()]
        training = Training(
            args=args,
            model=model,
            optimizers=[_optimizer(part, args) for part in parts],
            forward_step=_forward_step,
            data_iterators=data,
            phases=Phases(0, _ENDLESS),
            correction=None,
            statistics=None,
            hooks=Hooks(
                losses=lambda batch, losses: None,
                action=lambda kind, batch: None,
                shared=self._gradients_complete,
                updated=self._updated,
            ),
            timeline=Timeline(0),
        )
        with _schedule_shape(
            microbatches=cell.microbatches // self._updates_per_batch,
            virtual_stages=chunks if definition.megatron and chunks > 1 else None,
        ):
            self._steps: Steps = (
                SynchronousSteps(training) if definition.megatron else DelayedSteps(training, newest_version=0)
            )

    def run(self, batches: int) -> list[float]:
        self._completed.clear()
        updates = batches * self._updates_per_batch
        self._steps.run(self._update, updates)
        self._update += updates
        return list(self._completed)

    def _gradients_complete(self, chunk: int, update: int) -> tuple[float, ...]:
        """In a delayed schedule updates come later; a batch is complete with its last backward."""
        if not self._synchronous and chunk == self._last_chunk and (update + 1) % self._updates_per_batch == 0:
            self._completed.append(time.monotonic())
        return ()

    def _updated(self, report: UpdateReport) -> None:
        if self._synchronous:
            self._completed.append(time.monotonic())


def _check(schedule: str, chunks: int | None, cell: Cell) -> None:
    shape = {"stages": cell.stages, "microbatches": cell.microbatches, "batches": CHECKED_BATCHES}
    problems = schedule_problems(schedule, **shape)
    if chunks is not None and chunks > 1 and cell.microbatches % cell.stages:
        problems.append(f"{cell.microbatches} micro-batches are not a multiple of {cell.stages} stages")
    if problems:
        raise Refused("; ".join(problems))


def _config(args: argparse.Namespace, virtual_stages: int) -> Any:
    """Megatron's configuration of a chunk, as a run with so many virtual stages has it."""
    config = copy.copy(gpt_config_from_args(args).transformer)
    if virtual_stages > 1:
        config.virtual_pipeline_model_parallel_size = virtual_stages
        config.overlap_p2p_comm, config.batch_p2p_comm = True, False  # Megatron's defaults with virtual stages
        config.microbatch_group_size_per_vp_stage = args.pipeline_model_parallel_size
    config.grad_scale_func, config.finalize_model_grads_func = None, finalize_model_grads
    return config
