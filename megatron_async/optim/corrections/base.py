# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""What corrections of one-step-old gradients share: hooks around any torch optimizer's step.

A correction sees an optimizer's parameters before and after a step. It keeps what it remembers in the optimizer's own
state, so that whatever saves, shards or moves that state does the same with it, and it works on the master weights, so
that it does not matter how the optimizer computes its update, or where.

`step_in_pieces` bounds what a correction needs while a step runs. What a hook is given may therefore be a part of a
parameter, with state that is a part of the parameter's.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_async.optim.corrections.pieces import is_part, step_in_pieces


class Correction:
    """Base of the corrections; hooks that do nothing.

    Args:
        optimizers: torch optimizers whose steps are corrected.
        strength: the factor that the correction is named by, 0 for none.

    Raises:
        ValueError: strength negative or not finite.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer], strength: float = 1.0) -> None:
        if not math.isfinite(strength) or strength < 0:
            raise ValueError(f"correction strength {strength}: must be a finite number, at least 0")
        self.strength = strength
        self.optimizers = list(optimizers)
        self.active = False
        """Whether the next step is corrected. What the next one needs is remembered in either case."""
        self._paused = False
        for optimizer in self.optimizers:
            step_in_pieces(optimizer)
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._after_step)

    def before(self, optimizer: torch.optim.Optimizer, params: list[Tensor]) -> None:
        """Called before a step with those of the optimizer's parameters that have a delayed gradient."""

    def after(self, optimizer: torch.optim.Optimizer, params: list[Tensor]) -> None:
        """Called after the step, with the same parameters."""

    @contextmanager
    def newest_weights(self) -> Iterator[bool]:
        """Inside, the master weights are those to be evaluated and exported; before and after, those of training.

        Yields whether there is a difference, that is whether the model must be told.
        """
        yield False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, steps are the optimizer's alone: nothing is corrected or remembered."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._paused and (params := stepped_params(optimizer)):
            self.before(optimizer, params)

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._paused and (params := stepped_params(optimizer)):
            self.after(optimizer, params)


def stepped_params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Parameters that a step changes with a delayed gradient; those of no delay need no correction."""
    return [
        param
        for group in optimizer.param_groups
        for param in group["params"]
        if param.grad is not None and getattr(param, "gradient_delay", 1) > 0
    ]


def data_of(params: Iterable[Tensor]) -> list[Tensor]:
    """The values of parameters, to be changed in place."""
    return [param.detach() for param in params]


def remembered(optimizer: torch.optim.Optimizer, params: Iterable[Tensor], name: str) -> list[Tensor] | None:
    """The buffers called `name` of all `params`, or None where one has none yet."""
    buffers = [optimizer.state[param].get(name) for param in params]
    return None if any(buffer is None for buffer in buffers) else buffers


def remember(optimizer: torch.optim.Optimizer, params: Iterable[Tensor], name: str, values: Iterable[Tensor]) -> None:
    """Keep `values` as the buffers called `name`; a part of a parameter has its place in the parameter's buffer."""
    for param, value in zip(params, values, strict=True):
        if is_part(param):
            optimizer.state[param][name].copy_(value)
        else:
            optimizer.state[param][name] = value
