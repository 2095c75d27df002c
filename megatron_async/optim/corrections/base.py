# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The interface of corrections: two parts of an optimizer step, one before and one after the optimizer's own.

A correction sees master weights before and after a step, so it works with any optimizer. Its one buffer for each
parameter lives in the optimizer's state: whatever saves, shards or moves that state includes it.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_async.optim.step import Piece, StepContext

PREVIOUS_UPDATE = "previous_update"
"""Name of the buffer in the optimizer's state, of the parameter's shape: in most corrections the previous update."""


class Correction:
    """Base of the corrections.

    Args:
        optimizers: torch optimizers whose steps are corrected.
        strength: factor of the correction, 0 for none.

    Raises:
        ValueError: strength negative or not finite.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer], strength: float = 1.0) -> None:
        if not math.isfinite(strength) or strength < 0:
            raise ValueError(f"correction strength {strength}: must be a finite number, at least 0")
        self.strength = strength
        self.optimizers = list(optimizers)

    def before_step(self, piece: Piece, context: StepContext) -> None:
        """Part of a step, before the optimizer's own."""
        if params := delayed_params(piece):
            self.before(piece.optimizer, params, self._active(context))

    def after_step(self, piece: Piece, context: StepContext) -> None:
        """Part of a step, after the optimizer's own."""
        if params := delayed_params(piece):
            self.after(piece.optimizer, params, self._active(context))

    def before(self, optimizer: torch.optim.Optimizer, params: list[Tensor], active: bool) -> None:
        """Called with the parameters that have a delayed gradient.

        Args:
            optimizer: steps on them.
            params: of one piece.
            active: whether this step is corrected. Either way the correction records what the next step needs.
        """

    def after(self, optimizer: torch.optim.Optimizer, params: list[Tensor], active: bool) -> None:
        """Called after the step, with the same arguments."""

    @contextmanager
    def newest_weights(self) -> Iterator[bool]:
        """Show the master weights to be evaluated and exported; restore those of training on exit.

        Yields whether they differ, so that the model must be told.
        """
        yield False

    def _active(self, context: StepContext) -> bool:
        return context.corrected and self.strength > 0


def delayed_params(piece: Piece) -> list[Tensor]:
    """Parameters that a step changes with a delayed gradient; others need no correction."""
    return [param for param in piece.params if param.grad is not None and getattr(param, "gradient_delay", 1) > 0]


def data_of(params: Iterable[Tensor]) -> list[Tensor]:
    """The values of parameters, to be changed in place."""
    return [param.detach() for param in params]


def remembered(optimizer: torch.optim.Optimizer, params: Iterable[Tensor]) -> list[Tensor] | None:
    """The buffers of all `params`, or None where one has none yet."""
    buffers = [optimizer.state[param].get(PREVIOUS_UPDATE) for param in params]
    return None if any(buffer is None for buffer in buffers) else buffers


def remember(optimizer: torch.optim.Optimizer, params: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """Keep `values` as the buffers of `params`."""
    for param, value in zip(params, values, strict=True):
        optimizer.state[param][PREVIOUS_UPDATE] = value
