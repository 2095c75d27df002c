# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The stack of layers that every contender trains, cut into pieces that no contender can divide further.

A piece is half of what a rank holds: piece i of 2P. A rank has pieces 2r and 2r+1 as one stage, or r and P+r as two
looped virtual stages, or r and 2P-1-r as two in a V. Weights depend on the piece alone and micro-batches on their
number alone, so all contenders start from the same weights and see the same data.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from megatron_async.training.emulation import sleeping

LEARNING_RATE = 0.05
MOMENTUM = 0.9
_CLOCK_PERIOD = 64.0
"""Time stamps travel in one fp32 element: seconds modulo this, exact to 4 microseconds."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Emulated times.

    Attributes:
        forward_ms, backward_ms: one micro-batch through all of a rank.
        transfer_ms: how long after it was sent an activation or gradient of another rank can be used.
        slow_rank: this rank takes 1.2 times as long; None for balanced ranks.
    """

    forward_ms: float
    backward_ms: float
    transfer_ms: float = 0.0
    slow_rank: int | None = None

    def factor(self, rank: int) -> float:
        return 1.2 if rank == self.slow_rank else 1.0


@dataclass(frozen=True, slots=True)
class Cell:
    """One setting in which contenders meet; `pace` None is real compute.

    Attributes:
        stages, microbatches: P ranks and M micro-batches per batch.
        sequence, samples, hidden: a micro-batch's activations, [sequence, samples, hidden] in fp32.
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
    def label(self) -> str:
        if self.pace is None:
            return "real"
        parts = ["emulated"]
        if self.pace.slow_rank is not None:
            parts.append(f"rank {self.pace.slow_rank} 20 % slower")
        if self.pace.transfer_ms:
            parts.append(f"transfers {self.pace.transfer_ms:g} ms")
        return ", ".join(parts)


def emulated_cell(stages: int, microbatches: int, pace: Pace) -> Cell:
    """A cell whose layers compute next to nothing and sleep instead."""
    return Cell(stages, microbatches, pace, sequence=1, samples=1, hidden=8)


def microbatch(cell: Cell, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and target of a micro-batch; they repeat after two batches."""
    generator = torch.Generator().manual_seed(1000 + number % (2 * cell.microbatches))
    source, target = (torch.randn(cell.shape, generator=generator) for _ in range(2))
    return source, target


def microbatches(cell: Cell) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """All micro-batches of a run, in order."""
    data = [microbatch(cell, number) for number in range(2 * cell.microbatches)]
    while True:
        yield from data


class Layer(nn.Module):
    """A pre-norm transformer layer with causal attention; its products are nearly all of the time."""

    def __init__(self, hidden: int, generator: torch.Generator) -> None:
        super().__init__()
        self.heads = 4
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        sizes = ((hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden))
        linears = [nn.Linear(inputs, outputs, bias=False) for inputs, outputs in sizes]
        for linear in linears:
            nn.init.normal_(linear.weight, std=0.5 / math.sqrt(linear.in_features), generator=generator)
        self.linears = nn.ModuleList(linears)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        to_qkv, merge, widen, narrow = self.linears
        sequence, samples, hidden = x.shape
        qkv = to_qkv(self.norms[0](x)).view(sequence, samples, 3, self.heads, hidden // self.heads)
        query, key, value = qkv.permute(2, 1, 3, 0, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + merge(mixed.permute(2, 0, 1, 3).reshape(sequence, samples, hidden))
        return x + narrow(functional.gelu(widen(self.norms[1](x))))


class SleepingLayer(nn.Module):
    """One product by element, plus sleeps: half of the backward for the input's gradient, half for the weight's.

    Attributes:
        awake: whether it leaves out the sleeps, as it does until it is timed.
    """

    def __init__(self, hidden: int, generator: torch.Generator, pace: Pace, factor: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(1.0 + 0.1 * torch.randn(hidden, generator=generator))
        self.awake = True
        # A piece is half of a rank.
        self._forward_ms, self._half_ms = factor * pace.forward_ms / 2, factor * pace.backward_ms / 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.awake:
            return torch.tanh(x * self.weight)
        weight_ms = self._half_ms if x.requires_grad else 2 * self._half_ms
        x = sleeping(x, forward_ms=self._forward_ms, backward_ms=self._half_ms)
        return torch.tanh(x * sleeping(self.weight, forward_ms=0.0, backward_ms=weight_ms))


def make_piece(cell: Cell, index: int, rank: int = 0) -> nn.Module:
    """Piece `index` with its initial weights; an emulated one takes the time of `rank` once it is not awake."""
    generator = torch.Generator().manual_seed(index)
    if cell.pace is None:
        return Layer(cell.hidden, generator)
    return SleepingLayer(cell.hidden, generator, cell.pace, cell.pace.factor(rank))


class _FromLink(torch.autograd.Function):
    """The receiving end of an emulated link: waits for an activation, stamps the gradient that goes back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, transfer_ms: float) -> torch.Tensor:
        return _arrive(tensor, transfer_ms)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _stamp(gradients[0]), None


class _ToLink(torch.autograd.Function):
    """The sending end: stamps an activation, waits for the gradient that comes back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, transfer_ms: float) -> torch.Tensor:
        ctx.transfer_ms = transfer_ms
        return _stamp(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _arrive(gradients[0], ctx.transfer_ms), None


def _stamp(tensor: torch.Tensor) -> torch.Tensor:
    """The last channel carries the time of departure."""
    stamped = tensor.clone()
    stamped[..., -1] = time.monotonic() % _CLOCK_PERIOD
    return stamped


def _arrive(tensor: torch.Tensor, transfer_ms: float) -> torch.Tensor:
    underway = (time.monotonic() - float(tensor.reshape(-1)[-1])) % _CLOCK_PERIOD
    if (left := transfer_ms / 1000 - underway) > 0:
        time.sleep(left)
    arrived = tensor.clone()
    arrived[..., -1] = 0.0
    return arrived


class Stage(nn.Module):
    """Consecutive pieces, with what Megatron's schedule functions ask of a model chunk.

    Args:
        pieces: in order.
        first, last: whether the stack begins or ends here.
        config, model_type: Megatron's; None under torch.distributed.pipelining.
        links: transfer time in ms of the links before and behind the stage; 0 for none.
    """

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
        self.share_embeddings_and_output_weights = False
        self.input_tensor: torch.Tensor | None = None
        self._links = links

    def set_input_tensor(self, tensor: Any) -> None:
        self.input_tensor = tensor[0] if isinstance(tensor, list) else tensor

    def forward(self, x: torch.Tensor | None = None) -> torch.Tensor:
        if x is None:
            x = self.input_tensor
        assert x is not None
        before, behind = self._links
        if before:
            x = _FromLink.apply(x, before)  # type: ignore[no-untyped-call]
        for piece in self.pieces:
            x = piece(x)
        return _ToLink.apply(x, behind) if behind else x  # type: ignore[no-untyped-call, no-any-return]


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The loss. The last channel is left out: under emulated links it carries time stamps."""
    return (output - target)[..., :-1].square().mean()
