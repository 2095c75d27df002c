# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""One optimizer step as a list of parts, run over the master weights piece by piece.

    clip -> correction (before) -> step -> correction (after) -> QK-clip

The optimizers treat parameters independently, so stepping by pieces does not change the result. Parts that copy weights
need memory for one piece only.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron_async.optim.corrections import Correction
    from megatron_async.optim.qk_clip import QkClip
    from megatron_async.optim.statistics import UpdateStatistics

PIECE = 1 << 22
"""Elements of a piece: 16 MiB in fp32, about one layer. Larger pieces are not faster."""

CLIP_EPSILON = 1.0e-6
"""Megatron adds this to the norm before it divides (core/optimizer/clip_grads.py)."""

# Optimizers that count steps per parameter. Other ones may count steps per group.
_COUNT_BY_PARAMETER = ("torch.optim", "megatron_async", "emerging_optimizers")


def clip_factor(grad_norm: float, limit: float) -> float:
    """Factor that clips gradients of this L2 norm to `limit`; 1 if `limit` is 0."""
    return min(1.0, limit / (grad_norm + CLIP_EPSILON)) if limit > 0 else 1.0


@dataclass(frozen=True, slots=True)
class StepContext:
    """Arguments of one step.

    Attributes:
        batch: number of the batch, from 0.
        clip_factor: factor of the gradients.
        corrected: whether the correction of the delay applies.
        logits: largest attention logits of the batch, [softmax attentions, heads of this rank], or None.
    """

    batch: int
    clip_factor: float = 1.0
    corrected: bool = False
    logits: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """Parameters of one torch optimizer that are stepped together."""

    optimizer: torch.optim.Optimizer
    params: list[Tensor]

    @property
    def gradients(self) -> list[Tensor]:
        return [param.grad for param in self.params if param.grad is not None]


Part = Callable[[Piece, StepContext], None]


def clip(piece: Piece, context: StepContext) -> None:
    """Scale the gradients by the clip factor."""
    if context.clip_factor != 1.0 and (gradients := piece.gradients):
        torch._foreach_mul_(gradients, context.clip_factor)


def step(piece: Piece, context: StepContext) -> None:
    """Let the optimizer step."""
    piece.optimizer.step()


def parts(
    *,
    correction: "Correction | None" = None,
    statistics: "UpdateStatistics | None" = None,
    qk_clip: "QkClip | None" = None,
    optimizer_step: Part = step,
) -> list[Part]:
    """The parts of a step, in order.

    Args:
        correction: of the delay.
        statistics: measures the update with and without the correction.
        qk_clip: limits attention logits.
        optimizer_step: replaces `step` in ablations.
    """
    wanted: list[Part | None] = [
        statistics.at_start if statistics else None,
        clip,
        correction.before_step if correction else None,
        optimizer_step,
        statistics.after_step if statistics else None,
        correction.after_step if correction else None,
        statistics.at_end if statistics else None,
        qk_clip,
    ]
    return [part for part in wanted if part is not None]


class MasterStep:
    """Runs a list of parts over torch optimizers.

    Args:
        optimizers: torch optimizers of the master weights.
        parts: see `parts`.
        piece: elements of a piece.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer], parts: Sequence[Part], piece: int = PIECE) -> None:
        self._optimizers, self._parts, self._piece = list(optimizers), list(parts), piece

    @torch.no_grad()
    def __call__(self, context: StepContext) -> None:
        for optimizer in self._optimizers:
            for piece in pieces(optimizer, self._piece):
                for part in self._parts:
                    part(piece, context)


def pieces(optimizer: torch.optim.Optimizer, size: int = PIECE) -> Iterator[Piece]:
    """Pieces of an optimizer's parameters. The parameter groups hold only the current piece.

    Optimizers that may count steps per group have one piece.
    """
    groups = optimizer.param_groups
    everything = [list(group["params"]) for group in groups]
    if not type(optimizer).__module__.startswith(_COUNT_BY_PARAMETER):
        yield Piece(optimizer, [param for params in everything for param in params])
        return
    try:
        for piece in _cut(everything, size):
            for group, params in zip(groups, piece, strict=True):
                group["params"] = params
            yield Piece(optimizer, [param for params in piece for param in params])
    finally:
        for group, params in zip(groups, everything, strict=True):
            group["params"] = params


def _cut(groups: list[list[Tensor]], size: int) -> Iterator[list[list[Tensor]]]:
    """Split groups into pieces of at most `size` elements, with at least one parameter each."""
    piece: list[list[Tensor]] = [[] for _ in groups]
    held = 0
    for position, params in enumerate(groups):
        for param in params:
            if held and held + param.numel() > size:
                yield piece
                piece, held = [[] for _ in groups], 0
            piece[position].append(param)
            held += max(1, param.numel())
    if held:
        yield piece
