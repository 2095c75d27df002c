# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's schedule functions, and the product's own executor, on the stack.

The stack stands where Megatron's GPT model would: wrapped by Megatron's DistributedDataParallel, stepped by
Megatron's optimizer, run by the same `MegatronSteps` and `DelayedSteps` as a training run.
"""

import argparse
import copy
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.utils import unwrap_model

from benchmarks.contenders import Contender, Placement, Refused
from benchmarks.reference import CHECKED_BATCHES
from benchmarks.stack import LEARNING_RATE, MOMENTUM, Cell, mean_square, microbatches
from megatron_async.config import arguments
from megatron_async.mcore.build import GPT
from megatron_async.mcore.model import data_parallel
from megatron_async.mcore.optimizer import optimizer_for
from megatron_async.mcore.parallel import shape_of_schedule
from megatron_async.mcore.training import gpt_config_from_args
from megatron_async.pipeline.executor import Hooks
from megatron_async.pipeline.timeline import Timeline
from megatron_async.pipeline.update import UpdateReport
from megatron_async.schedules import schedule_problems
from megatron_async.training.phases import Phases
from megatron_async.training.steps import DelayedSteps, MegatronSteps, Steps, Training

_ENDLESS = 10**9


def command_line(cell: Cell) -> argparse.Namespace:
    """Arguments of a Megatron run with the stack's sizes; the model that they describe is never built."""
    return arguments.parse(
        f"""--device cpu --pipeline-model-parallel-size {cell.stages} --num-layers {2 * cell.stages}
        --hidden-size {cell.hidden} --num-attention-heads 4 --seq-length {cell.sequence}
        --max-position-embeddings {cell.sequence} --micro-batch-size {cell.samples}
        --global-batch-size {cell.microbatches * cell.samples} --train-iters {_ENDLESS}
        --optimizer sgd --sgd-momentum {MOMENTUM} --lr {LEARNING_RATE} --weight-decay 0 --clip-grad 0
        --tokenizer-type NullTokenizer --vocab-size 64 --mock-data --eval-iters 0""".split()
    )


def _forward_step(data: Iterator[Any] | None, model: Any) -> tuple[torch.Tensor, Any]:
    (stage,) = unwrap_model([model])
    pair: Any = next(data) if data is not None else (None, None)
    source, target = pair
    return model(source if stage.pre_process else None), partial(_loss, target)


def _loss(target: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    loss = mean_square(output, target)
    return loss, torch.ones((), dtype=torch.int), {"lm loss": loss.detach()}


class MegatronContender:
    """A training run's `Steps` on the stack.

    Args:
        args: of the run, see `command_line`.
        schedule: `--pipeline-schedule`.
        placement: of the pieces on ranks.
    """

    def __init__(self, args: argparse.Namespace, cell: Cell, rank: int, schedule: str, placement: Placement) -> None:
        args = argparse.Namespace(**vars(args))
        args.pipeline_schedule = schedule
        virtual = placement.of_rank(rank)
        stages = {
            index: placement.build(cell, rank, index, config=_config(args, len(virtual)), model_type=GPT)
            for index in virtual
        }
        self.pieces = placement.pieces(stages)
        self._updates_per_batch = cell.microbatches if schedule == "pipedream" else 1
        self.unsteady = (0, 0) if schedule == "1f1b" else (1, 1)
        self._update, self._last_chunk = 0, len(virtual) - 1
        self._completed: list[float] = []
        model = [data_parallel(stage, args) for stage in stages.values()]
        parts = [[chunk] for chunk in model] if schedule == "wpipe" else [model]
        optimizers = [optimizer_for(part, args) for part in parts]
        training = Training(
            args=args,
            model=model,
            optimizers=optimizers,
            forward_step=_forward_step,
            data_iterators=[
                microbatches(cell) if stage.pre_process or stage.post_process else None for stage in stages.values()
            ],
            phases=Phases(0, _ENDLESS),
            hooks=Hooks(
                losses=lambda batch, losses: None,
                before_update=lambda chunk, batch: None,
                shared=self._all_gradients_here,
                updated=lambda report: self._updated(report),
            ),
            timeline=Timeline(0),
        )
        self._synchronous = schedule == "1f1b"
        with shape_of_schedule(
            microbatches=1 if schedule == "pipedream" else cell.microbatches,
            virtual_stages=len(virtual) if self._synchronous and len(virtual) > 1 else None,
        ):
            self._steps: Steps = (
                MegatronSteps(training, None) if self._synchronous else DelayedSteps(training, newest_version=0)
            )

    def run(self, batches: int) -> list[float]:
        self._completed.clear()
        updates = batches * self._updates_per_batch
        self._steps.run(self._update, updates)
        self._update += updates
        return list(self._completed)

    def _all_gradients_here(self, chunk: int, update: int) -> tuple[float, ...]:
        """In a delayed schedule updates lag behind; a batch is complete with its last backward."""
        if not self._synchronous and chunk == self._last_chunk and (update + 1) % self._updates_per_batch == 0:
            self._completed.append(time.monotonic())
        return ()

    def _updated(self, report: UpdateReport) -> None:
        if self._synchronous:
            self._completed.append(time.monotonic())


def _config(args: argparse.Namespace, virtual_stages: int) -> Any:
    """Megatron's configuration of one contender's chunks, as a run with so many virtual stages would have it."""
    config = copy.copy(gpt_config_from_args(args).transformer)
    if args.pipeline_schedule == "1f1b" and virtual_stages > 1:
        config.virtual_pipeline_model_parallel_size = virtual_stages
        config.overlap_p2p_comm, config.batch_p2p_comm = True, False  # Megatron's defaults with virtual stages
        config.microbatch_group_size_per_vp_stage = args.pipeline_model_parallel_size
    config.grad_scale_func, config.finalize_model_grads_func = None, finalize_model_grads
    return config


def megatron_1f1b(args: argparse.Namespace, cell: Cell, rank: int) -> Contender:
    """Megatron-Core's 1F1B."""
    return MegatronContender(args, cell, rank, "1f1b", Placement.straight(cell.stages))


def megatron_interleaved(args: argparse.Namespace, cell: Cell, rank: int) -> Contender:
    """Megatron-Core's interleaved 1F1B with two virtual stages on each rank."""
    if cell.microbatches % cell.stages:
        raise Refused(f"{cell.microbatches} micro-batches are not a multiple of {cell.stages} stages")
    return MegatronContender(args, cell, rank, "1f1b", Placement.looped(cell.stages))


def delayed(schedule: str, args: argparse.Namespace, cell: Cell, rank: int) -> Contender:
    """One of the product's schedules."""
    place = Placement.looped if schedule == "wpipe" else Placement.straight
    problems = schedule_problems(schedule, stages=cell.stages, microbatches=cell.microbatches, batches=CHECKED_BATCHES)
    if problems:
        raise Refused("; ".join(problems))
    return MegatronContender(args, cell, rank, schedule, place(cell.stages))
