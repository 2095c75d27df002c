# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Contenders: each trains batches of a cell on this rank, under its own schedule."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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
        unsteady: batches at the start and end of a run that fill and drain the pipe and do not count; none where every
            batch does.
    """

    pieces: dict[int, nn.Module]
    unsteady: tuple[int, int]

    def run(self, batches: int) -> list[float]:
        """Train; return when this rank completed each batch, in seconds of the monotonic clock."""


class Refused(Exception):
    """A contender that cannot run in a cell; the message says why."""


Factory = Callable[[Cell, int], Contender]
"""Makes a contender for a cell and rank; collective. Raises Refused."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The rank and pieces of each virtual stage, in the order of the model."""

    virtual: tuple[tuple[int, tuple[int, ...]], ...]

    @classmethod
    def straight(cls, stages: int) -> "Placement":
        """One stage for each rank."""
        return cls(tuple((rank, (2 * rank, 2 * rank + 1)) for rank in range(stages)))

    @classmethod
    def looped(cls, stages: int) -> "Placement":
        """Two virtual stages for each rank, the second round behind the first."""
        return cls(tuple((index % stages, (index,)) for index in range(2 * stages)))

    @classmethod
    def folded(cls, stages: int) -> "Placement":
        """Two virtual stages for each rank in a V: the first rank has the first and the last."""
        return cls(tuple((min(index, 2 * stages - 1 - index), (index,)) for index in range(2 * stages)))

    def of_rank(self, rank: int) -> list[int]:
        """Virtual stages of a rank, in model order."""
        return [index for index, (owner, _) in enumerate(self.virtual) if owner == rank]

    def build(self, cell: Cell, rank: int, index: int, **megatron: Any) -> Stage:
        """Virtual stage `index` on `rank`, with a link to each neighbor on another rank."""
        transfer = cell.pace.transfer_ms if cell.pace else 0.0
        last = len(self.virtual) - 1
        before, behind = (
            transfer if 0 <= neighbor <= last and self.virtual[neighbor][0] != rank else 0.0
            for neighbor in (index - 1, index + 1)
        )
        pieces = [make_piece(cell, piece, rank) for piece in self.virtual[index][1]]
        return Stage(pieces, first=index == 0, last=index == last, links=(before, behind), **megatron)

    def pieces(self, stages: Mapping[int, Stage]) -> dict[int, nn.Module]:
        """The parts of the stack in some virtual stages, by number."""
        return {
            number: module
            for index, stage in stages.items()
            for number, module in zip(self.virtual[index][1], stage.pieces, strict=True)
        }


def make_optimizer(modules: Sequence[nn.Module]) -> torch.optim.Optimizer:
    """The optimizer of all contenders; those on Megatron get the same from Megatron's factory."""
    params = [param for module in modules for param in module.parameters()]
    return torch.optim.SGD(params, lr=LEARNING_RATE, momentum=MOMENTUM)


class SynchronousContender:
    """Trains batch by batch.

    Args:
        pieces: of this rank.
        modules: hold them; stepped by the optimizer.
        forward_and_backward: computes the gradients of batch number n.
    """

    unsteady = (0, 0)

    def __init__(
        self,
        pieces: dict[int, nn.Module],
        modules: Sequence[nn.Module],
        forward_and_backward: Callable[[int], None],
    ) -> None:
        self.pieces = pieces
        self._forward_and_backward, self._optimizer, self._batch = forward_and_backward, make_optimizer(modules), 0

    def run(self, batches: int) -> list[float]:
        return [self._step() for _ in range(batches)]

    def _step(self) -> float:
        self._optimizer.zero_grad()
        self._forward_and_backward(self._batch)
        self._optimizer.step()
        self._batch += 1
        return time.monotonic()
