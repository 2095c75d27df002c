# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The stack of layers that every contender trains.

It has 2P pieces of one layer. A rank holds pieces 2r and 2r+1 as one stage, r and P+r as two looped virtual stages, or
r and 2P-1-r as two in a V. Weights depend on the number of the piece and micro-batches on their own number, so all
contenders start from the same weights and see the same data.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

LEARNING_RATE = 0.05
MOMENTUM = 0.9
DATA_BATCHES = 2
"""Micro-batches repeat after so many batches."""

_CLOCK_PERIOD = 64.0
"""Time stamps travel in one fp32 element: seconds modulo this, exact to 4 microseconds."""

Sample = tuple[torch.Tensor, torch.Tensor]
"""Input and target of a micro-batch, each [sequence, samples, hidden]."""


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
        sequence, samples, hidden: activations of a micro-batch are [sequence, samples, hidden] in fp32.
    """

    stages: int
    microbatches: int
    pace: Pace | None = None
    sequence: int = 256
    samples: int = 6
    hidden: int = 256

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.sequence, self.samples, self.hidden

    @property
    def compute(self) -> str:
        return "real" if self.pace is None else "emulated"

    @property
    def setting(self) -> str:
        """The kind of compute, and what differs from balanced stages with free transfers."""
        parts = [self.compute]
        if self.pace is not None and self.pace.slow_rank is not None:
            parts.append(f"rank {self.pace.slow_rank} 20 % slower")
        if self.pace is not None and self.pace.transfer_ms:
            parts.append(f"transfers {self.pace.transfer_ms:g} ms")
        return ", ".join(parts)


def emulated_cell(stages: int, microbatches: int, pace: Pace) -> Cell:
    """A cell whose layers sleep and compute next to nothing."""
    return Cell(stages, microbatches, pace, sequence=1, samples=1, hidden=8)


def microbatch(cell: Cell, number: int) -> Sample:
    """Micro-batch `number` of a run."""
    generator = torch.Generator().manual_seed(1000 + number % (DATA_BATCHES * cell.microbatches))
    source, target = (torch.randn(cell.shape, generator=generator) for _ in range(2))
    return source, target


def microbatches(cell: Cell) -> Iterator[Sample]:
    """All micro-batches of a run, in order."""
    data = [microbatch(cell, number) for number in range(DATA_BATCHES * cell.microbatches)]
    while True:
        yield from data


class _Sleep(torch.autograd.Function):
    """Identity that takes time in both directions."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, forward_ms: float, backward_ms: float) -> torch.Tensor:
        ctx.backward_ms = backward_ms
        time.sleep(forward_ms / 1000)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward_ms / 1000)
        return gradients[0], None, None


def sleeping(tensor: torch.Tensor, *, forward_ms: float, backward_ms: float) -> torch.Tensor:
    """A copy of `tensor` that takes `forward_ms` now, and `backward_ms` when its gradient passes back."""
    result: torch.Tensor = _Sleep.apply(tensor, forward_ms, backward_ms)  # type: ignore[no-untyped-call]
    return result


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
        x = sleeping(x, forward_ms=self._forward_ms, backward_ms=self._half_ms)
        return torch.tanh(x * sleeping(self.weight, forward_ms=0.0, backward_ms=weight_ms))


def make_piece(cell: Cell, index: int, rank: int = 0) -> nn.Module:
    """Piece `index` with its initial weights; an emulated one takes the time of `rank`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(index)
        if cell.pace is not None:
            return SleepingLayer(cell.hidden, cell.pace, rank)
        width = cell.hidden
        return nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, norm_first=True, bias=False)


class _Link(torch.autograd.Function):
    """One end of an emulated link. The last channel of a message carries its time of departure."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, transfer_ms: float, incoming: bool) -> torch.Tensor:
        ctx.transfer_ms, ctx.incoming = transfer_ms, incoming
        return _arrive(tensor, transfer_ms) if incoming else _depart(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = gradients
        return _depart(gradient) if ctx.incoming else _arrive(gradient, ctx.transfer_ms), None, None


def _depart(tensor: torch.Tensor) -> torch.Tensor:
    stamped = tensor.clone()
    stamped[..., -1] = time.monotonic() % _CLOCK_PERIOD
    return stamped


def _arrive(tensor: torch.Tensor, transfer_ms: float) -> torch.Tensor:
    underway = (time.monotonic() - float(tensor.reshape(-1)[-1])) % _CLOCK_PERIOD
    time.sleep(max(0.0, transfer_ms / 1000 - underway))
    arrived = tensor.clone()
    arrived[..., -1] = 0.0
    return arrived


class Stage(nn.Module):
    """Consecutive pieces, with what Megatron's schedule functions ask of a model chunk.

    Args:
        pieces: in order.
        first, last: whether the stack begins or ends here.
        config: Megatron's; None under torch.distributed.pipelining.
        links: transfer times in ms before and behind the stage; 0 for none.
    """

    share_embeddings_and_output_weights = False

    def __init__(
        self,
        pieces: Sequence[nn.Module],
        *,
        first: bool,
        last: bool,
        config: Any = None,
        model_type: Any = None,
        links: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        super().__init__()
        self.pieces = nn.ModuleList(pieces)
        self.pre_process, self.post_process, self.config, self.model_type = first, last, config, model_type
        self.links = links
        self.input_tensor: torch.Tensor | None = None

    def set_input_tensor(self, tensor: Any) -> None:
        self.input_tensor = tensor[0] if isinstance(tensor, list) else tensor

    def forward(self, x: torch.Tensor | None = None) -> torch.Tensor:
        x = self.input_tensor if x is None else x
        assert x is not None
        before, behind = self.links
        if before:
            x = _Link.apply(x, before, True)  # type: ignore[no-untyped-call]
        for piece in self.pieces:
            x = piece(x)
        return _Link.apply(x, behind, False) if behind else x  # type: ignore[no-untyped-call, no-any-return, return-value]


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The loss. The last channel is left out: emulated links use it for time stamps."""
    return (output - target)[..., :-1].square().mean()
