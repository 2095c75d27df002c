# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Takes back one step of an optimizer where the device, not the host, knows whether the step applies.

A step with a gradient that is not finite must change nothing. On GPUs the host does not wait for the norm: it launches
the step in any case. Weights and state are copied before the step, piece by piece, and the device selects the copies
if the step does not apply.
"""

from collections.abc import Iterable, Iterator
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
        self._optimizer = optimizer
        self._params = [param for param in params if param.grad is not None]
        self._weights = [param.detach().clone() for param in self._params]
        self._state = [(param, name, value.clone()) for param, name, value in self._tensors()]
        self._counters = list(self._host_counters())

    def keep_if(self, applies: Tensor) -> None:
        """After the step: restore weights and state unless `applies`, a 0-dim bool tensor, is true."""
        for param, before in zip(self._params, self._weights, strict=True):
            _select(applies, param.detach(), before)
        for param, name, before in self._state:
            _select(applies, self._optimizer.state[param][name], before)
        self._weights, self._state = [], []

    def restore_counters(self) -> None:
        """The step did not apply: restore what the host counts."""
        for container, name, value in self._counters:
            container[name] = value

    def _tensors(self) -> Iterator[tuple[Tensor, str, Tensor]]:
        """State on the device of its parameter. Optimizers may put other tensors in its place at a step."""
        for param in self._params:
            for name, value in self._optimizer.state[param].items():
                if isinstance(value, Tensor) and value.device == param.device:
                    yield param, name, value

    def _host_counters(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        """Numbers of steps of each parameter, as numbers or tensors on the CPU."""
        for param in self._params:
            state = self._optimizer.state[param]
            for name, value in state.items():
                if isinstance(value, Tensor) and value.device != param.device:
                    yield state, name, value.clone()
                elif not isinstance(value, Tensor):
                    yield state, name, value


def _select(applies: Tensor, after: Tensor, before: Tensor) -> None:
    torch.where(applies, after, before, out=after)
