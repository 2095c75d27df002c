# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""torch.distributed.pipelining, and the limit: a rank's compute with nothing in between."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.microbatch import TensorChunkSpec

from benchmarks import reference
from benchmarks.contenders import Contender, Placement, Refused, SynchronousContender, make_optimizer
from benchmarks.stack import Cell, mean_square, microbatch

_SCHEDULES: dict[str, tuple[Any, Any]] = {
    "torch-gpipe": (schedules.ScheduleGPipe, Placement.straight),
    "torch-1f1b": (schedules.Schedule1F1B, Placement.straight),
    "torch-interleaved-1f1b": (schedules.ScheduleInterleaved1F1B, Placement.looped),
    "torch-interleaved-zero-bubble": (schedules.ScheduleInterleavedZeroBubble, Placement.looped),
    "torch-zbv": (schedules.ScheduleZBVZeroBubble, Placement.folded),
    "torch-dualpipev": (schedules.ScheduleDualPipeV, Placement.folded),
}

_BATCHES = 2
"""Micro-batches repeat after so many batches, so these are all the data there is."""


def pipelined(name: str, cell: Cell, rank: int) -> Contender:
    """One of torch.distributed.pipelining's schedules.

    Raises:
        Refused: the schedule does not take this number of micro-batches.
    """
    schedule_class, place = _SCHEDULES[name]
    placement: Placement = place(cell.stages)
    stages = {index: placement.build(cell, rank, index) for index in placement.of_rank(rank)}
    example, with_gradient = (torch.empty(cell.shape, device="meta", requires_grad=grad) for grad in (False, True))
    pipeline_stages = [
        pipelining.PipelineStage(
            stage,
            index,
            len(placement.virtual),
            torch.device("cpu"),
            input_args=(example if index == 0 else with_gradient,),
            output_args=(with_gradient,),
        )
        for index, stage in stages.items()
    ]
    try:
        schedule = schedule_class(
            pipeline_stages if len(pipeline_stages) > 1 else pipeline_stages[0],
            cell.microbatches,
            loss_fn=lambda output, target: mean_square(output, target[0]),
            args_chunk_spec=(TensorChunkSpec(1),),
        )
    except ValueError as error:
        raise Refused(str(error)) from error
    data = [_whole_batch(cell, batch) for batch in range(_BATCHES)]
    first, last = 0 in stages, len(placement.virtual) - 1 in stages

    def forward_and_backward(batch: int) -> None:
        source, target = data[batch % _BATCHES]
        schedule.step(
            *([source] if first else []), target=target if last else None, losses=[] if last else None,
            return_outputs=False,
        )  # fmt: skip

    return SynchronousContender(placement.pieces(stages), forward_and_backward, make_optimizer([*stages.values()]))


def _whole_batch(cell: Cell, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs side by side along the samples, targets in front of one another."""
    parts = [microbatch(cell, batch * cell.microbatches + position) for position in range(cell.microbatches)]
    return torch.cat([source for source, _ in parts], dim=1), torch.stack([target for _, target in parts])


def limit(cell: Cell, rank: int) -> Contender:
    """A rank's forwards, backwards, loss and optimizer steps on what neighbors would have sent, without neighbors."""
    placement = Placement.straight(cell.stages)
    alone = Placement(tuple((rank, pieces) for _, pieces in placement.virtual))  # no emulated links
    stage = alone.build(cell, rank, rank)
    boundaries = reference.boundaries(cell, rank, reference.CHECKED_BATCHES)
    data, last = [microbatch(cell, number) for number in range(_BATCHES * cell.microbatches)], rank == cell.stages - 1

    def forward_and_backward(batch: int) -> None:
        for position, (source, gradient) in enumerate(boundaries[batch % len(boundaries)]):
            output = stage(source.detach().requires_grad_(not stage.pre_process))
            if last:
                _, target = data[(batch * cell.microbatches + position) % len(data)]
                (mean_square(output, target) / cell.microbatches).backward()
            else:
                output.backward(gradient)

    return SynchronousContender(alone.pieces({rank: stage}), forward_and_backward, make_optimizer([stage]))


NAMES: Sequence[str] = tuple(_SCHEDULES)
