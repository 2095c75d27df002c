# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""What corrections of one-step-old gradients share: hooks around any torch optimizer's step.

A correction sees an optimizer's parameters before and after a step. It keeps what it remembers in the optimizer's own
state, so that whatever saves, shards or moves that state does the same with it, and it works on the master weights, so
that it does not matter how the optimizer computes its update, or where.

`step_in_pieces` bounds what a correction needs while a step runs.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

PREVIOUS_UPDATE = "previous_update"
"""Name of the one buffer that a correction keeps for each parameter, in the optimizer's state and shaped like it: the
previous update, in most cases."""

PIECE = 1 << 22
"""Elements of the weights that are stepped on at once under a correction, at least one parameter: 16 MiB in fp32, in
the order of one layer. Larger pieces need more memory and are no faster."""

# Optimizers that count steps for each parameter. Fused ones from elsewhere may count calls for the whole group.
_COUNT_BY_PARAMETER = ("torch.optim", "megatron_async", "emerging_optimizers")


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
    """Keep `values` as the buffers called `name`."""
    for param, value in zip(params, values, strict=True):
        optimizer.state[param][name] = value


def step_in_pieces(optimizer: torch.optim.Optimizer, piece: int = PIECE) -> None:
    """Let every step of an optimizer go over its parameters piece by piece, hooks included.

    The result is the same, because no optimizer here relates different parameters. What is copied around a step is as
    large as a piece then, not as the model. An optimizer that may count its steps by group, and one that
    steps in pieces already, is left as it is.
    """
    if not type(optimizer).__module__.startswith(_COUNT_BY_PARAMETER) or "step" in vars(optimizer):
        return
    whole = optimizer.step

    def step(closure: Any = None) -> Any:
        assert closure is None, "pieces have no loss of their own"
        groups = optimizer.param_groups
        everything = [group["params"] for group in groups]
        try:
            for part in _pieces(everything, piece):
                for group, params in zip(groups, part, strict=True):
                    group["params"] = params
                whole()
        finally:
            for group, params in zip(groups, everything, strict=True):
                group["params"] = params

    optimizer.step = step  # type: ignore[method-assign]


def _pieces(groups: list[list[Tensor]], piece: int) -> Iterator[list[list[Tensor]]]:
    """Cut lists of parameters into parts of at most `piece` elements, or one parameter."""
    part: list[list[Tensor]] = [[] for _ in groups]
    size = 0
    for position, params in enumerate(groups):
        for param in params:
            if size and size + param.numel() > piece:
                yield part
                part, size = [[] for _ in groups], 0
            part[position].append(param)
            size += param.numel()
    if size:
        yield part
