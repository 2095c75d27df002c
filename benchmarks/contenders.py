# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Contenders: each trains batches of a cell on this rank, under its own schedule."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import nn

from benchmarks.stack import LEARNING_RATE, MOMENTUM, Cell, Stage, make_piece
from megatron_async.schedules import SCHEDULES

LIMIT = "limit"
"""Compute alone: a rank's work without communication. All others are compared with it."""

OURS = tuple(name for name, definition in SCHEDULES.items() if definition.delayed)
"""This package's schedules."""


class Contender(Protocol):
    """A schedule at work on one rank.

    Attributes:
        pieces: this rank's parts of the stack, by number.
        unsteady: batches that fill and drain the pipe at the start and end of a run, and do not count.
    """

    pieces: dict[int, nn.Module]
    unsteady: tuple[int, int]

    def run(self, batches: int) -> list[float]:
        """Train; return when this rank completed each batch, in seconds of the monotonic clock."""


class Refused(Exception):
    """A contender that cannot run in a cell; the message says why."""


Factory = Callable[[Cell, int], Contender]
"""Makes a contender for a cell and rank; collective. Raises Refused."""


Placement = Sequence[tuple[int, tuple[int, ...]]]
"""The rank and the pieces of each virtual stage, in the order of the model."""


def straight(stages: int) -> Placement:
    """One stage for each rank."""
    return [(rank, (2 * rank, 2 * rank + 1)) for rank in range(stages)]


def looped(stages: int) -> Placement:
    """Two virtual stages for each rank, the second round behind the first."""
    return [(index % stages, (index,)) for index in range(2 * stages)]


def folded(stages: int) -> Placement:
    """Two virtual stages for each rank in a V: the first rank has the first and the last."""
    return [(min(index, 2 * stages - 1 - index), (index,)) for index in range(2 * stages)]


def build(cell: Cell, placement: Placement, rank: int) -> dict[int, Stage]:
    """The virtual stages of a rank by number, each with a link to every neighbor on another rank."""
    last, transfer_ms = len(placement) - 1, cell.pace.transfer_ms if cell.pace else 0.0

    def link(neighbor: int) -> float:
        return transfer_ms if 0 <= neighbor <= last and placement[neighbor][0] != rank else 0.0

    return {
        index: Stage(
            {piece: make_piece(cell, piece, rank) for piece in pieces},
            first=index == 0,
            last=index == last,
            links=(link(index - 1), link(index + 1)),
        )
        for index, (owner, pieces) in enumerate(placement)
        if owner == rank
    }


def pieces_of(stages: Iterable[Stage]) -> dict[int, nn.Module]:
    """The parts of the stack in some stages, by number."""
    return {int(number): piece for stage in stages for number, piece in stage.pieces.items()}


def make_optimizer(modules: Sequence[nn.Module]) -> torch.optim.Optimizer:
    """The optimizer of all contenders; those on Megatron get the same from Megatron's factory."""
    params = [param for module in modules for param in module.parameters()]
    return torch.optim.SGD(params, lr=LEARNING_RATE, momentum=MOMENTUM)


class SynchronousContender:
    """Trains batch by batch; `forward_and_backward` computes the gradients of batch number n."""

    unsteady = (0, 0)

    def __init__(self, stages: Iterable[Stage], forward_and_backward: Callable[[int], None]) -> None:
        self.pieces, self._forward_and_backward, self._batch = pieces_of(stages), forward_and_backward, 0
        self._optimizer = make_optimizer([*self.pieces.values()])

    def run(self, batches: int) -> list[float]:
        ends = []
        for _ in range(batches):
            self._optimizer.zero_grad()
            self._forward_and_backward(self._batch)
            self._optimizer.step()
            self._batch += 1
            ends.append(time.monotonic())
        return ends
