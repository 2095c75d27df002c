# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Corrections of one-step-old gradients, as hooks around any torch optimizer's step.

With u_b the whole update of step b (learning rate and decoupled weight decay included), error feedback of strength
k is, after equation (4) of arXiv 2606.30634,

    W_(b+1) = W_b - u_b - k (u_b - u_(b-1))

The optimizer itself is not asked for u: it is the difference of the weights before and after its step, taken on the
master weights, so the correction works with every optimizer and under every sharding.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from megatron_async import megatron

CORRECTIONS = ("none", "error-feedback")
# Kept with the optimizer's own state, so that whatever saves, shards or moves that state does the same with it.
PREVIOUS_UPDATE = "previous_update"


class ErrorFeedback:
    """Adds the strength-weighted change of the update to each update.

    Persistent memory: one buffer of the size of the master weights. While a step runs, one more (the weights before
    it) is alive.

    Args:
        optimizers: torch optimizers whose steps are corrected.
        strength: k above; 0 changes nothing.

    Raises:
        ValueError: strength negative or not finite.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer], strength: float = 1.0) -> None:
        if not math.isfinite(strength) or strength < 0:
            raise ValueError(f"error feedback strength {strength}: must be a finite number, at least 0")
        self._strength = strength
        self._before: dict[int, list[torch.Tensor]] = {}
        self.active = False
        """Whether the next step is corrected. Updates are remembered in either case."""
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._remember_weights)
            optimizer.register_step_post_hook(self._correct)

    @torch.no_grad()
    def _remember_weights(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._before[id(optimizer)] = [param.detach().clone() for param in _params(optimizer)]

    @torch.no_grad()
    def _correct(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        params = [param.detach() for param in _params(optimizer)]
        updates = self._before.pop(id(optimizer))
        if not params:
            return
        torch._foreach_sub_(updates, params)
        previous = [optimizer.state[param].get(PREVIOUS_UPDATE) for param in _params(optimizer)]
        if self.active and self._strength > 0 and all(tensor is not None for tensor in previous):
            torch._foreach_sub_(previous, updates)
            torch._foreach_add_(params, previous, alpha=self._strength)
        for param, update in zip(_params(optimizer), updates, strict=True):
            optimizer.state[param][PREVIOUS_UPDATE] = update


def _params(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Parameters with delayed gradients; those without are left alone."""
    for group in optimizer.param_groups:
        yield from (param for param in group["params"] if getattr(param, "gradient_delay", 1) > 0)


def make(name: str, strength: float, optimizer: megatron.MegatronOptimizer) -> ErrorFeedback | None:
    """The correction `--staleness-correction name` of a Megatron optimizer; None for "none"."""
    if name == "none":
        return None
    return ErrorFeedback((inner.optimizer for inner in megatron.inner_optimizers(optimizer)), strength)
