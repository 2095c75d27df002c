# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The stack of layers that every contender trains.

It has 2P pieces of one layer. A rank holds pieces 2r and 2r+1 as one stage, r and P+r as two looped virtual stages, or
r and 2P-1-r as two in a V. Weights depend on the number of the piece and micro-batches on their own number, so all
contenders start from the same weights and see the same data.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import nn

LEARNING_RATE, MOMENTUM = 0.05, 0.9
DATA_BATCHES = 2
"""Micro-batches repeat after so many batches."""

_CLOCK_PERIOD = 64.0
"""Time stamps travel in one fp32 element: seconds modulo this, exact to 4 microseconds."""

Sample = tuple[torch.Tensor, torch.Tensor]
"""Input and target of a micro-batch, each [sequence, samples, hidden]."""

_Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Pace:
    """Emulated times.

    Attributes:
        forward_ms, backward_ms: one micro-batch through all layers of a rank.
        transfer_ms: an activation or gradient of another rank can be used so long after it was sent.
        slow_rank: takes 1.2 times as long; None for balanced ranks.
    """

    forward_ms: float
    backward_ms: float
    transfer_ms: float = 0.0
    slow_rank: int | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """One setting in which contenders meet.

    Attributes:
        stages, microbatches: P ranks and M micro-batches per batch.
        pace: emulated times; None for real compute.
        rounds, batches: turns of each contender, and batches of a turn that count.
        sequence, samples, hidden: activations of a micro-batch are [sequence, samples, hidden] in fp32.
    """

    stages: int
    microbatches: int
    pace: Pace | None = None
    rounds: int = 1
    batches: int = 2
    sequence: int = 256
    samples: int = 6
    hidden: int = 256

    @property
    def compute(self) -> str:
        return "real" if self.pace is None else "emulated"

    @property
    def setting(self) -> str:
        """The kind of compute, and what differs from balanced stages with free transfers."""
        slow = f", rank {self.pace.slow_rank} 20 % slower" if self.pace and self.pace.slow_rank is not None else ""
        links = f", transfers {self.pace.transfer_ms:g} ms" if self.pace and self.pace.transfer_ms else ""
        return f"{self.compute}{slow}{links}"


def emulated_cell(stages: int, microbatches: int, pace: Pace, **extent: int) -> Cell:
    """A cell whose layers sleep and compute next to nothing."""
    return Cell(stages, microbatches, pace, sequence=1, samples=1, hidden=8, **extent)


def microbatch(cell: Cell, number: int) -> Sample:
    """Micro-batch `number` of a run."""
    generator = torch.Generator().manual_seed(1000 + number % (DATA_BATCHES * cell.microbatches))
    shape = (cell.sequence, cell.samples, cell.hidden)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def microbatches(cell: Cell) -> Iterator[Sample]:
    """All micro-batches of a run, in order."""
    return cycle([microbatch(cell, number) for number in range(DATA_BATCHES * cell.microbatches)])


class _Passing(torch.autograd.Function):
    """One function of a tensor on the way forward, another of its gradient on the way back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, there: _Change, back: _Change) -> torch.Tensor:
        ctx.back = back
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(gradients[0]), None, None


def _passing(tensor: torch.Tensor, there: _Change, back: _Change) -> torch.Tensor:
    return _Passing.apply(tensor, there, back)  # type: ignore[no-untyped-call, no-any-return]


def _slept(milliseconds: float, tensor: torch.Tensor) -> torch.Tensor:
    time.sleep(milliseconds / 1000)
    return tensor.clone()


def _depart(tensor: torch.Tensor) -> torch.Tensor:
    """A message with its time of departure in the last channel."""
    stamped = tensor.clone()
    stamped[..., -1] = time.monotonic() % _CLOCK_PERIOD
    return stamped


def _arrive(transfer_ms: float, tensor: torch.Tensor) -> torch.Tensor:
    """The message, when the transfer is over."""
    underway = (time.monotonic() - float(tensor.reshape(-1)[-1])) % _CLOCK_PERIOD
    arrived = _slept(max(0.0, transfer_ms - 1000 * underway), tensor)
    arrived[..., -1] = 0.0
    return arrived


class SleepingLayer(nn.Module):
    """An element-wise product and sleeps: half of the backward for the input's gradient, half for the weight's.

    Attributes:
        awake: whether the sleeps are left out, as in the check of the weights.
    """

    def __init__(self, hidden: int, pace: Pace, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1.0 + 0.1 * torch.randn(hidden))
        self.awake = True
        factor = 1.2 if rank == pace.slow_rank else 1.0
        self._forward_ms, self._half_ms = factor * pace.forward_ms / 2, factor * pace.backward_ms / 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.awake:
            return torch.tanh(x * self.weight)
        weight_ms = self._half_ms if x.requires_grad else 2 * self._half_ms
        x = _passing(x, partial(_slept, self._forward_ms), partial(_slept, self._half_ms))
        return torch.tanh(x * _passing(self.weight, torch.clone, partial(_slept, weight_ms)))


def make_piece(cell: Cell, index: int, rank: int = 0) -> nn.Module:
    """Piece `index` with its initial weights; an emulated one takes the time of `rank`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(index)
        if cell.pace is not None:
            return SleepingLayer(cell.hidden, cell.pace, rank)
        width = cell.hidden
        return nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, norm_first=True, bias=False)


class Stage(nn.Module):
    """Consecutive pieces, with what Megatron's schedule functions ask of a model chunk.

    Args:
        pieces: by number, in order.
        first, last: whether the stack begins or ends here.
        links: transfer times in ms before and behind the stage; 0 for none.

    Attributes:
        config, model_type: Megatron's, where it runs the stage.
    """

    config: Any = None
    model_type: Any = None
    share_embeddings_and_output_weights = False

    def __init__(
        self, pieces: Mapping[int, nn.Module], *, first: bool, last: bool, links: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        super().__init__()
        self.pieces = nn.ModuleDict({str(number): piece for number, piece in pieces.items()})
        self.pre_process, self.post_process, self.links = first, last, links
        self.input_tensor: torch.Tensor | None = None

    def set_input_tensor(self, tensor: Any) -> None:
        self.input_tensor = tensor[0] if isinstance(tensor, list) else tensor

    def forward(self, x: torch.Tensor | None = None) -> torch.Tensor:
        x = self.input_tensor if x is None else x
        assert x is not None
        before, behind = self.links
        if before:
            x = _passing(x, partial(_arrive, before), _depart)
        for piece in self.pieces.values():
            x = piece(x)
        return _passing(x, _depart, partial(_arrive, behind)) if behind else x


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The loss. The last channel is left out: emulated links use it for time stamps."""
    return (output - target)[..., :-1].square().mean()
