# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""torch.distributed.pipelining, and the limit: compute alone."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.microbatch import TensorChunkSpec

from benchmarks import contenders, reference
from benchmarks.contenders import LIMIT, Contender, Factory, Placement, Refused, SynchronousContender
from benchmarks.stack import DATA_BATCHES, Cell, Sample, Stage, make_piece, mean_square, microbatch

_SCHEDULES: dict[str, tuple[Any, Callable[[int], Placement]]] = {
    "torch-gpipe": (schedules.ScheduleGPipe, contenders.straight),
    "torch-1f1b": (schedules.Schedule1F1B, contenders.straight),
    "torch-interleaved-1f1b": (schedules.ScheduleInterleaved1F1B, contenders.looped),
    "torch-interleaved-zero-bubble": (schedules.ScheduleInterleavedZeroBubble, contenders.looped),
    "torch-zbv": (schedules.ScheduleZBVZeroBubble, contenders.folded),
    "torch-dualpipev": (schedules.ScheduleDualPipeV, contenders.folded),
}


def factories() -> Mapping[str, Factory]:
    """The limit and torch's schedules by name."""
    return {LIMIT: limit} | {name: partial(_pipelined, name) for name in _SCHEDULES}


def _pipelined(name: str, cell: Cell, rank: int) -> Contender:
    schedule_class, place = _SCHEDULES[name]
    placement = place(cell.stages)
    stages = contenders.build(cell, placement, rank)
    example, with_gradient = microbatch(cell, 0)
    with_gradient.requires_grad_()
    count, device = len(placement), torch.device("cpu")
    parts = [
        pipelining.PipelineStage(
            stage, index, count, device, (with_gradient if index else example,), output_args=(with_gradient,)
        )
        for index, stage in stages.items()
    ]
    try:
        schedule = schedule_class(
            parts if len(parts) > 1 else parts[0],
            cell.microbatches,
            loss_fn=lambda output, target: mean_square(output, target[0]),
            args_chunk_spec=(TensorChunkSpec(1),),
        )
    except ValueError as error:
        raise Refused(str(error)) from error
    data = [_whole_batch(cell, batch) for batch in range(DATA_BATCHES)]
    first, last = 0 in stages, count - 1 in stages

    def forward_and_backward(batch: int) -> None:
        source, target = data[batch % DATA_BATCHES]
        inputs = [source] if first else []
        outputs = {"target": target, "losses": []} if last else {}
        schedule.step(*inputs, **outputs, return_outputs=False)

    return SynchronousContender(stages.values(), forward_and_backward)


def _whole_batch(cell: Cell, batch: int) -> Sample:
    """Inputs side by side along the samples, targets stacked."""
    parts = [microbatch(cell, batch * cell.microbatches + position) for position in range(cell.microbatches)]
    return torch.cat([source for source, _ in parts], dim=1), torch.stack([target for _, target in parts])


def limit(cell: Cell, rank: int) -> Contender:
    """Forwards, backwards, loss and optimizer steps of a rank, on what its neighbors would have sent."""
    pieces = {number: make_piece(cell, number, rank) for number in (2 * rank, 2 * rank + 1)}
    stage = Stage(pieces, first=rank == 0, last=rank == cell.stages - 1)
    boundaries = reference.boundaries(cell, rank)
    targets = [microbatch(cell, number)[1] for number in range(DATA_BATCHES * cell.microbatches)]

    def forward_and_backward(batch: int) -> None:
        for number in range(batch * cell.microbatches, (batch + 1) * cell.microbatches):
            source, gradient = boundaries[number % len(boundaries)]
            output = stage(source.detach().requires_grad_(not stage.pre_process))
            if stage.post_process:
                (mean_square(output, targets[number % len(targets)]) / cell.microbatches).backward()
            else:
                output.backward(gradient)

    return SynchronousContender([stage], forward_and_backward)
