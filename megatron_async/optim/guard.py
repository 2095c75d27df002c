# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Takes back one step of an optimizer where the device, not the host, knows whether the step applies.

A step with a gradient that is not finite must change nothing. On GPUs the host does not wait for the norm: it launches
the step in any case. Weights and state are copied before the step, piece by piece, and the device selects the copies
if the step does not apply.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Guard:
    """Weights, state and counters of some parameters before a step.

    Args:
        optimizer: the optimizer, with state for every parameter that has a gradient.
        params: parameters of one piece.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, params: Iterable[Tensor]) -> None:
        self._weights: list[tuple[Tensor, Tensor]] = []
        self._state: list[tuple[dict[str, Any], str, Tensor]] = []
        self._counters: list[tuple[dict[str, Any], str, Any]] = []  # numbers of steps, or tensors on the CPU
        for param in params:
            if param.grad is None:
                continue
            self._weights.append((param.detach(), param.detach().clone()))
            state = optimizer.state[param]
            for name, value in state.items():
                on_device = isinstance(value, Tensor) and value.device == param.device
                before = value.clone() if isinstance(value, Tensor) else value
                (self._state if on_device else self._counters).append((state, name, before))

    def keep_if(self, applies: Tensor) -> None:
        """After the step: restore weights and state unless `applies`, a 0-dim bool tensor, is true."""
        # Optimizers may have put other tensors in the place of their state.
        for after, before in [*self._weights, *((state[name], before) for state, name, before in self._state)]:
            torch.where(applies, after, before, out=after)
        self._weights, self._state = [], []

    def restore_counters(self) -> None:
        """The step did not apply: restore what the host counts for each parameter."""
        for state, name, before in self._counters:
            state[name] = before
