# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Optimizer state that can be allocated before the first step, as loading a checkpoint needs."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

Group = dict[str, Any]
Shape = tuple[int, ...]


def require_fp32(optimizer: str, param: Tensor) -> None:
    """Refuse a parameter that is no fp32 tensor.

    torch casts loaded state to the parameter's type, so state of a 16-bit parameter would lose its precision
    on every resume.
    """
    if param.dtype != torch.float32:
        raise ValueError(
            f"{optimizer} steps on fp32 master weights; got a parameter of shape {tuple(param.shape)} and "
            f"{param.dtype}: give it the fp32 copy of that parameter"
        )


class EagerState:
    """Mixin of a torch optimizer: its state is fp32 buffers whose shapes follow from the parameter's.

    Allocation takes no step and needs no gradient.
    """

    counts_steps: ClassVar[bool] = False
    """Whether the state holds ``step``, the number of steps taken: a 0-dim fp32 tensor on the CPU as in
    torch's optimizers, so that reading it never waits for a device."""

    param_groups: list[Group]
    state: defaultdict[Tensor, Any]

    def state_shapes(self, param: Tensor) -> dict[str, Shape]:
        """Name and shape of each buffer that belongs to ``param``."""
        raise NotImplementedError

    def init_state(self, param: Tensor) -> None:
        """Allocate the state of one parameter, all zeros. Buffers that exist stay, as do those of others.

        Raises:
            ValueError: the parameter is not fp32, or has a shape the optimizer cannot take.
        """
        require_fp32(type(self).__name__, param)
        shapes = self.state_shapes(param)
        state = self.state[param]
        if self.counts_steps and "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
        for name, shape in shapes.items():
            if name not in state:
                state[name] = torch.zeros(shape, dtype=torch.float32, device=param.device)

    def init_states(self) -> None:
        """Allocate the state of every parameter."""
        for group in self.param_groups:
            for param in group["params"]:
                self.init_state(param)

    def _init_group(self, group: Group, skip_non_grad_params: bool = True) -> None:
        """The same for one group, under the name that Megatron and emerging-optimizers call."""
        for param in group["params"]:
            if param.grad is not None or not skip_non_grad_params:
                self.init_state(param)


class StepwiseOptimizer(EagerState, torch.optim.Optimizer):
    """The loop of an optimizer that steps a parameter group at once; subclasses write :meth:`update`."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step with the gradients in ``param.grad``; parameters without one stay as they are.

        Args:
            closure: computes the loss and the gradients, as for torch's optimizers; its result is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._init_group(group)
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                self.update(params, group)
        return loss

    def update(self, params: list[Tensor], group: Group) -> None:
        """Step the given parameters, which all have a gradient and state."""
        raise NotImplementedError

    def buffers(self, params: list[Tensor], name: str) -> list[Tensor]:
        """The state called ``name`` of each parameter."""
        return [self.state[param][name] for param in params]

    def next_steps(self, params: list[Tensor]) -> list[int]:
        """Count a step for each parameter and return the counts, the first being 1."""
        steps = self.buffers(params, "step")
        torch._foreach_add_(steps, 1.0)
        return [int(step) for step in steps]


def gradients(params: list[Tensor]) -> list[Tensor]:
    """The gradients of parameters that all have one."""
    return [param.grad for param in params if param.grad is not None]
