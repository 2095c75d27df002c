# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The stack trained in one process: the weights that every contender must arrive at."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import nn

from benchmarks.contenders import make_optimizer
from benchmarks.stack import Cell, Sample, Stage, make_piece, mean_square, microbatch
from megatron_async.reference.delay import DelayOracle, Group
from megatron_async.schedules import SCHEDULES

CHECKED_BATCHES = 3
"""The third batch is the first whose gradient depends on an update with a delay."""


def trained(cell: Cell, contender: str) -> Sequence[nn.Module]:
    """All pieces after the checked batches, with the delays of the contender."""
    definition = SCHEDULES.get(contender, SCHEDULES["1f1b"])  # those of torch and Megatron have no delay
    size = 1 if definition.update_per_microbatch else cell.microbatches
    return _trained(cell, definition.layer_delays(cell.stages), CHECKED_BATCHES * cell.microbatches // size, size)


@lru_cache(maxsize=8)
def _trained(cell: Cell, delays: tuple[int, ...], updates: int, size: int) -> Sequence[nn.Module]:
    """Shared by contenders with the same delays; nobody changes it."""
    pieces = [make_piece(cell, index) for index in range(2 * cell.stages)]
    stack, optimizer = Stage(pieces, first=True, last=True), make_optimizer(pieces)
    per_delay = len(pieces) // len(delays)
    oracle = DelayOracle(
        [Group(list(piece.parameters()), delays[index // per_delay], []) for index, piece in enumerate(pieces)]
    )
    for update in range(updates):
        optimizer.zero_grad()
        with oracle.stale():
            for number in range(update * size, (update + 1) * size):
                source, target = microbatch(cell, number)
                (mean_square(stack(source), target) / size).backward()
        optimizer.step()
        oracle.record()
    return pieces


def boundaries(cell: Cell, rank: int, batches: int) -> list[list[Sample]]:
    """Input of a rank and gradient of its output, by batch and micro-batch of a synchronous run."""
    pieces = [make_piece(cell, index) for index in range(2 * cell.stages)]
    parts = pieces[: 2 * rank], pieces[2 * rank : 2 * rank + 2], pieces[2 * rank + 2 :]
    before, own, behind = (Stage(part, first=True, last=True) for part in parts)
    optimizer = make_optimizer(pieces)
    seen: list[list[Sample]] = []
    for batch in range(batches):
        optimizer.zero_grad()
        seen.append([])
        for number in range(batch * cell.microbatches, (batch + 1) * cell.microbatches):
            source, target = microbatch(cell, number)
            entering = before(source)
            leaving = own(entering)
            leaving.retain_grad()
            (mean_square(behind(leaving), target) / cell.microbatches).backward()
            seen[-1].append((entering.detach(), leaving.grad))
        optimizer.step()
    return seen


def _flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([param.detach().reshape(-1).double() for param in module.parameters()])


def distance(piece: nn.Module, expected: nn.Module, initial: nn.Module) -> float:
    """Distance of a piece from the expected one, relative to the distance of that from its initial weights."""
    return float((_flat(piece) - _flat(expected)).norm() / (_flat(expected) - _flat(initial)).norm())


def largest_distance(cell: Cell, pieces: dict[int, nn.Module], expected: Sequence[nn.Module]) -> float:
    """The largest distance over some pieces of the stack."""
    return max(distance(piece, expected[index], make_piece(cell, index)) for index, piece in pieces.items())
