# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""One optimizer step as a list of parts, run over the master weights piece by piece.

    clip -> correction (before) -> step -> correction (after) -> QK-clip

The optimizers treat parameters independently, so stepping by pieces does not change the result. Parts that copy weights
need memory for one piece only.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_async.optim.guard import Guard

if TYPE_CHECKING:
    from megatron_async.optim.corrections import Correction
    from megatron_async.optim.qk_clip import QkClip
    from megatron_async.optim.statistics import UpdateStatistics

PIECE = 1 << 22
"""Elements of a piece: 16 MiB in fp32, about one layer. Larger pieces are not faster."""

# Optimizers that count steps per parameter, or per group as `step`. Others may count them elsewhere.
_KNOWN_COUNTERS = ("torch.optim", "megatron_async", "emerging_optimizers", "transformer_engine", "apex")

CLIP_EPSILON = 1.0e-6
"""Megatron adds this to the norm before it divides (core/optimizer/clip_grads.py)."""


def clip_factor[Norm: (float, Tensor)](grad_norm: Norm, limit: float) -> Norm | float:
    """Factor that clips gradients of this L2 norm, a number or a 0-dim tensor, to `limit`; 1 if `limit` is 0."""
    if limit <= 0:
        return 1.0
    ratio = limit / (grad_norm + CLIP_EPSILON)
    return ratio.clamp(max=1.0) if isinstance(ratio, Tensor) else min(1.0, ratio)


@dataclass(frozen=True, slots=True)
class StepContext:
    """Arguments of one step.

    Attributes:
        batch: number of the batch, from 0.
        clip_factor: factor of the gradients; a 0-dim tensor where only the device knows it.
        corrected: whether the correction of the delay applies.
        logits: largest attention logits of the batch, [softmax attentions, heads of this rank], or None.
        applies: 0-dim bool tensor: whether the step takes effect, where only the device knows it; None: it does. The
            gradients must be finite in either case.
    """

    batch: int
    clip_factor: float | Tensor = 1.0
    corrected: bool = False
    logits: Tensor | None = None
    applies: Tensor | None = None


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
    factor = context.clip_factor
    if (isinstance(factor, Tensor) or factor != 1.0) and (gradients := piece.gradients):
        torch._foreach_mul_(gradients, factor)


def step(piece: Piece, context: StepContext) -> None:
    """Let the optimizer step."""
    piece.optimizer.step()


def parts(
    *,
    correction: "Correction | None" = None,
    statistics: "UpdateStatistics | None" = None,
    qk_clip: "QkClip | None" = None,
    optimizer_step: Part = step,
    zeros: Part | None = None,
) -> list[Part]:
    """The parts of a step, in order.

    Args:
        correction: of the delay.
        statistics: measures the update with and without the correction.
        qk_clip: limits attention logits.
        optimizer_step: replaces `step` in ablations.
        zeros: counts zeros in the gradient.
    """
    wanted: list[Part | None] = [
        statistics.copy if statistics else None,
        zeros,
        clip,
        correction.before_step if correction else None,
        optimizer_step,
        statistics.copy if statistics else None,
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
        self._guards: list[Guard] = []
        self._counts: list[tuple[dict[str, Any], Any]] = []

    @torch.no_grad()
    def __call__(self, context: StepContext) -> None:
        groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
        self._guards, self._counts = [], [(group, group.get("step")) for group in groups]
        for optimizer in self._optimizers:
            for piece in pieces(optimizer, self._piece):
                guard = None if context.applies is None else Guard(optimizer, piece.params)
                for part in self._parts:
                    part(piece, context)
                if guard is not None and context.applies is not None:
                    guard.keep_if(context.applies)
                    self._guards.append(guard)

    def take_back(self) -> None:
        """The last step did not apply, as the host knows by now: restore the counters that the host holds."""
        for guard in self._guards:
            guard.restore_counters()
        for group, count in self._counts:
            if count is None:
                group.pop("step", None)
            else:
                group["step"] = count
        self._guards, self._counts = [], []


@contextmanager
def only(optimizer: torch.optim.Optimizer, members: Sequence[list[Tensor]]) -> Iterator[None]:
    """Inside the block the optimizer has copies of its groups, with these parameters and counters of their own."""
    groups = optimizer.param_groups
    optimizer.param_groups = [{**group, "params": params} for group, params in zip(groups, members, strict=True)]
    try:
        yield
    finally:
        optimizer.param_groups = groups


def pieces(optimizer: torch.optim.Optimizer, size: int = PIECE) -> Iterator[Piece]:
    """Pieces of an optimizer's parameters. While one is stepped, the parameter groups hold nothing else.

    Every piece takes the same step of its groups. An optimizer that may count steps elsewhere has one piece.
    """
    groups = optimizer.param_groups
    everything = [group["params"] for group in groups]
    if not type(optimizer).__module__.startswith(_KNOWN_COUNTERS):
        yield Piece(optimizer, list(chain(*everything)))
        return
    counts: dict[int, object] = {}
    for members in _cut(everything, size):
        with only(optimizer, members):
            yield Piece(optimizer, list(chain(*members)))
            stepped = [(index, group) for index, group in enumerate(optimizer.param_groups) if group["params"]]
            counts |= {index: group["step"] for index, group in stepped if "step" in group}
    for index, count in counts.items():
        groups[index]["step"] = count


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
