# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The interface of corrections: they surround the optimizer's own step.

A correction uses only the master weights before and after the step, so it works with any optimizer. It keeps one buffer
per parameter in the optimizer state, so it is saved, sharded and moved with that state.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor

from megatron_async.optim.step import Piece, StepContext

PREVIOUS_UPDATE = "previous_update"
"""Name of the buffer in the optimizer state, with the parameter's shape. Most corrections keep the previous update."""


class Correction(ABC):
    """Base of the corrections.

    Args:
        optimizers: torch optimizers whose steps are corrected.
        strength: factor of the correction, 0 for none.

    Raises:
        ValueError: strength negative or not finite.
    """

    from_first_update: ClassVar[bool] = False
    """Whether the first update of the delayed phase is corrected too, when there is no earlier update yet."""
    _step: Iterator[None]

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer], strength: float = 1.0) -> None:
        if not math.isfinite(strength) or strength < 0:
            raise ValueError(f"correction strength {strength}: must be a finite number, at least 0")
        self.strength = strength
        self.optimizers = list(optimizers)
        for optimizer in self.optimizers:
            # Transformer Engine's FusedAdam looks up the type of each name in its state when it is saved and loaded.
            if (types := getattr(optimizer, "name_to_dtype_map", None)) is not None:
                types[PREVIOUS_UPDATE] = torch.float32

    def before_norm(self, active: bool) -> None:  # noqa: B027 (most have nothing to do here)
        """Called when the gradients of a whole batch are there and are not clipped, by the delay oracle alone."""

    def before_step(self, piece: Piece, context: StepContext) -> None:
        """Part before the optimizer's step."""
        params = delayed_params(piece)
        self._step = self.around(piece.optimizer, params, self._active(context.corrected)) if params else iter(())
        next(self._step, None)

    def after_step(self, piece: Piece, context: StepContext) -> None:
        """Part after the optimizer's step."""
        next(self._step, None)

    @abstractmethod
    def around(self, optimizer: torch.optim.Optimizer, params: list[Tensor], active: bool) -> Iterator[None]:
        """Correct a step, which is taken at the one `yield`. Runs without recording gradients.

        Args:
            optimizer: the optimizer of the parameters.
            params: parameters of one piece with delayed gradients.
            active: whether this step is corrected. The correction records its buffer in any case.
        """

    @contextmanager
    def newest_weights(self) -> Iterator[bool]:
        """Use the master weights for evaluation and export; restore the training weights on exit.

        Yields whether they differ. The caller then publishes them to the model.
        """
        yield False

    def _active(self, corrected: bool) -> bool:
        return corrected and self.strength > 0


def leave_out(params: Iterable[Tensor]) -> None:
    """Corrections leave these parameters alone from now on."""
    for param in params:
        param.uncorrected = True  # type: ignore[attr-defined]


def delayed_params(piece: Piece) -> list[Tensor]:
    """Parameters of a piece that are to be corrected: their gradients are delayed, and they were not left out."""
    return [
        param
        for param in piece.params
        if param.grad is not None and getattr(param, "gradient_delay", 1) > 0 and not hasattr(param, "uncorrected")
    ]


def gradients_of(params: Iterable[Tensor]) -> list[Tensor]:
    """The gradients of parameters that have one."""
    return [param.grad for param in params if param.grad is not None]


def remembered(optimizer: torch.optim.Optimizer, params: Iterable[Tensor]) -> list[Tensor] | None:
    """The buffers of `params`; None if one of them is missing."""
    buffers = [optimizer.state[param].get(PREVIOUS_UPDATE) for param in params]
    return None if any(buffer is None for buffer in buffers) else buffers


def remember(optimizer: torch.optim.Optimizer, params: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """Store `values` as the buffers of `params`."""
    for param, value in zip(params, values, strict=True):
        optimizer.state[param][PREVIOUS_UPDATE] = value
