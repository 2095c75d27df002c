# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The stack trained in one process: the weights that every contender must arrive at."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import nn

from benchmarks.contenders import make_optimizer
from benchmarks.stack import Cell, Sample, make_piece, mean_square, microbatch
from megatron_async.reference.delay import DelayOracle, Group
from megatron_async.schedules import SCHEDULES

CHECKED_BATCHES = 3
"""The third batch is the first whose gradient depends on an update with a delay."""


def trained(cell: Cell, contender: str) -> Sequence[nn.Module]:
    """All pieces after the checked batches, with the delays of the contender."""
    definition = SCHEDULES.get(contender, SCHEDULES["1f1b"])  # those of torch and Megatron have no delay
    size = 1 if definition.update_per_microbatch else cell.microbatches
    return _train(cell, definition.layer_delays(cell.stages), size)[0]


def boundaries(cell: Cell, rank: int) -> Sequence[Sample]:
    """Input of a rank and gradient of its output in each micro-batch of a synchronous run of the checked batches."""
    return _train(cell, SCHEDULES["1f1b"].layer_delays(cell.stages), cell.microbatches, rank)[1]


@lru_cache(maxsize=8)
def _train(
    cell: Cell, delays: tuple[int, ...], size: int, rank: int = 0
) -> tuple[Sequence[nn.Module], Sequence[Sample]]:
    """Train the checked batches, `size` micro-batches an update. Contenders with the same delays share the result.

    Returns:
        The pieces, and for each micro-batch the input of a rank and the gradient of its output.
    """
    pieces, first = [make_piece(cell, index) for index in range(2 * cell.stages)], 2 * rank
    parts = pieces[:first], pieces[first : first + 2], pieces[first + 2 :]
    before, own, behind = (nn.Sequential(*part) for part in parts)
    optimizer, per_delay = make_optimizer(pieces), len(pieces) // len(delays)
    oracle = DelayOracle(
        [Group(list(piece.parameters()), delays[index // per_delay], []) for index, piece in enumerate(pieces)]
    )
    seen: list[Sample] = []
    for start in range(0, CHECKED_BATCHES * cell.microbatches, size):
        optimizer.zero_grad()
        with oracle.stale():
            for number in range(start, start + size):
                source, target = microbatch(cell, number)
                entering = before(source)
                leaving = own(entering)
                leaving.retain_grad()
                (mean_square(behind(leaving), target) / size).backward()
                seen.append((entering.detach(), leaving.grad))
        optimizer.step()
        oracle.record()
    return pieces, seen


def _flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([param.detach().reshape(-1).double() for param in module.parameters()])


def distance(piece: nn.Module, expected: nn.Module, initial: nn.Module) -> float:
    """Distance of a piece from the expected one, relative to the distance of that from its initial weights."""
    return float((_flat(piece) - _flat(expected)).norm() / (_flat(expected) - _flat(initial)).norm())


def largest_distance(cell: Cell, pieces: dict[int, nn.Module], expected: Sequence[nn.Module]) -> float:
    """The largest distance over some pieces of the stack."""
    return max(distance(piece, expected[index], make_piece(cell, index)) for index, piece in pieces.items())
