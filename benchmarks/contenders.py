# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""What every contender is: something that trains batches of a cell on this rank."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from benchmarks.stack import LEARNING_RATE, MOMENTUM, Cell, Stage, make_piece
from megatron_async.schedules import SCHEDULES

LIMIT = "limit"
"""The contender that all others are compared with: a rank's compute alone."""

OURS: Sequence[str] = tuple(name for name in SCHEDULES if name != "1f1b")
"""This package's schedules."""


class Contender(Protocol):
    """A schedule at work on one rank.

    Attributes:
        pieces: this rank's parts of the stack, by number.
        unsteady: batches at the beginning and end of each run whose times do not count, because the pipe fills and
            drains there: none where it does so in every batch.
    """

    pieces: dict[int, nn.Module]
    unsteady: tuple[int, int]

    def run(self, batches: int) -> list[float]:
        """Train; return when, in seconds of the monotonic clock, this rank completed each batch."""


class Refused(Exception):
    """A contender that cannot run in a cell; the message says why."""


Factory = Callable[[Cell, int], Contender]
"""Makes a contender for a cell and rank; collective. Raises Refused."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Which pieces make up each virtual stage, and on which rank it is.

    Attributes:
        virtual: for each virtual stage in model order its rank and pieces.
    """

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
        """Two virtual stages for each rank in the shape of a V: the first rank has the first and the last."""
        return cls(tuple((min(index, 2 * stages - 1 - index), (index,)) for index in range(2 * stages)))

    def of_rank(self, rank: int) -> list[int]:
        """Numbers of the virtual stages of a rank, in model order."""
        return [index for index, (owner, _) in enumerate(self.virtual) if owner == rank]

    def build(self, cell: Cell, rank: int, index: int, **megatron: Any) -> Stage:
        """Virtual stage `index` on `rank`; see `Stage` for what Megatron needs."""
        transfer = cell.pace.transfer_ms if cell.pace else 0.0

        def link(neighbor: int) -> float:
            """Transfer time to a neighboring virtual stage: none to one on the same rank or beyond the ends."""
            inside = 0 <= neighbor < len(self.virtual)
            return transfer if inside and self.virtual[neighbor][0] != rank else 0.0

        return Stage(
            [make_piece(cell, piece, rank) for piece in self.virtual[index][1]],
            first=index == 0,
            last=index == len(self.virtual) - 1,
            **megatron,
            links=(link(index - 1), link(index + 1)),
        )

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
    """Batches one after the other, with an optimizer step at the end of each.

    Args:
        pieces: of this rank.
        forward_and_backward: computes the gradients of batch number n.
        optimizer: steps them.
    """

    unsteady = (0, 0)

    def __init__(
        self,
        pieces: dict[int, nn.Module],
        forward_and_backward: Callable[[int], None],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self.pieces = pieces
        self._forward_and_backward, self._optimizer = forward_and_backward, optimizer
        self._batch = 0

    def run(self, batches: int) -> list[float]:
        return [self._step() for _ in range(batches)]

    def _step(self) -> float:
        self._optimizer.zero_grad()
        self._forward_and_backward(self._batch)
        self._optimizer.step()
        self._batch += 1
        return time.monotonic()
