# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The stack trained in one process: what every contender must arrive at."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import nn

from benchmarks.contenders import make_optimizer
from benchmarks.stack import Cell, Stage, make_piece, mean_square, microbatch
from megatron_async.reference.delay import DelayOracle, Group

CHECKED_BATCHES = 3
"""Batches of the check: the third is the first whose gradient depends on an update with a delay."""

Boundary = tuple[torch.Tensor, torch.Tensor]
"""A micro-batch's input of a rank, and the gradient of its output."""


def piece_delays(cell: Cell, contender: str) -> list[int]:
    """Gradient delay, in updates, of each piece of the stack under a contender."""
    pieces = range(2 * cell.stages)
    match contender:
        case "2bw" | "2bw-eager":
            return [1 for _ in pieces]
        case "wpipe":
            return [1 if piece < cell.stages else 0 for piece in pieces]
        case "pipedream":
            return [cell.stages - 1 - piece // 2 for piece in pieces]
    return [0 for _ in pieces]


def updates(cell: Cell, contender: str) -> tuple[int, int]:
    """How many updates the checked batches have, and micro-batches in each."""
    if contender == "pipedream":
        return CHECKED_BATCHES * cell.microbatches, 1
    return CHECKED_BATCHES, cell.microbatches


def trained(cell: Cell, contender: str) -> Sequence[nn.Module]:
    """All pieces after the checked batches, under the contender's delays."""
    return _trained(cell, tuple(piece_delays(cell, contender)), *updates(cell, contender))


@lru_cache(maxsize=8)
def _trained(cell: Cell, delays: tuple[int, ...], count: int, size: int) -> Sequence[nn.Module]:
    """All synchronous contenders share one; nobody changes it."""
    pieces = [make_piece(cell, index) for index in range(2 * cell.stages)]
    stack, optimizer = Stage(pieces, first=True, last=True), make_optimizer(pieces)
    oracle = DelayOracle([Group(tuple(piece.parameters()), delay) for piece, delay in zip(pieces, delays, strict=True)])
    for update in range(count):
        optimizer.zero_grad()
        with oracle.stale():
            for number in range(update * size, (update + 1) * size):
                source, target = microbatch(cell, number)
                (mean_square(stack(source), target) / size).backward()
        optimizer.step()
        oracle.record()
    return pieces


def boundaries(cell: Cell, rank: int, batches: int) -> list[list[Boundary]]:
    """What a rank's neighbors send it over the first batches of a synchronous run, by batch and micro-batch."""
    pieces = [make_piece(cell, index) for index in range(2 * cell.stages)]
    before, own, behind = (
        Stage(part, first=True, last=True) for part in (pieces[: 2 * rank], pieces[2 * rank : 2 * rank + 2],
                                                       pieces[2 * rank + 2 :])
    )  # fmt: skip
    optimizer = make_optimizer(pieces)
    seen: list[list[Boundary]] = []
    for batch in range(batches):
        optimizer.zero_grad()
        seen.append([])
        for number in range(batch * cell.microbatches, (batch + 1) * cell.microbatches):
            source, target = microbatch(cell, number)
            entering = before(source)
            leaving = own(entering)
            leaving.retain_grad()
            (mean_square(behind(leaving), target) / cell.microbatches).backward()
            assert leaving.grad is not None
            seen[-1].append((entering.detach(), leaving.grad))
        optimizer.step()
    return seen


@torch.no_grad()
def distance(piece: nn.Module, expected: nn.Module, initial: nn.Module) -> float:
    """How far a piece is from the expected one, relative to how far that has come from its initial weights."""

    def flat(module: nn.Module) -> torch.Tensor:
        return torch.cat([param.reshape(-1).double() for param in module.parameters()])

    return float((flat(piece) - flat(expected)).norm() / (flat(expected) - flat(initial)).norm())


def largest_distance(cell: Cell, pieces: dict[int, nn.Module], expected: Sequence[nn.Module]) -> float:
    """The largest distance over some pieces of the stack."""
    return max(distance(piece, expected[index], make_piece(cell, index)) for index, piece in pieces.items())
