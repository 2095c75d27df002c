# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Optimizer state that can be allocated before the first step, as loading a checkpoint needs."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_async.optim.hyperparameters import Hyperparameters

Group = dict[str, Any]
Shape = tuple[int, ...]

Extent = Literal["element", "matrix", "row", "left", "right"]
"""Shape of a state buffer. "element": that of the parameter. The others have none for parameters with one axis; for a
(rows, columns) matrix or a stack of them: "matrix" the same, "row" (rows, 1), "left" (rows, rows), "right" (columns,
columns)."""
State = Mapping[str, Extent]
"""Name and extent of each buffer."""


def shapes(state: State, shape: Shape) -> dict[str, Shape]:
    """Name and shape of each buffer that belongs to a parameter of this shape."""
    found = {}
    for name, extent in state.items():
        if extent == "element":
            found[name] = shape
        elif len(shape) > 1:
            *stack, rows, columns = shape
            sizes = {"matrix": (rows, columns), "row": (rows, 1), "left": (rows, rows), "right": (columns, columns)}
            found[name] = (*stack, *sizes[extent])
    return found


class EagerState:
    """Mixin of a torch optimizer: its state is fp32 buffers, allocated without a step or a gradient."""

    STATE: ClassVar[State]
    COUNTS_STEPS: ClassVar[bool] = False
    """Whether the state holds `step`, the number of steps taken: a 0-dim fp32 tensor on the CPU as in torch's
    optimizers, so that reading it never waits for a device."""

    param_groups: list[Group]
    state: defaultdict[Tensor, Any]

    def check_parameter(self, param: Tensor) -> None:
        """Refuse a parameter that is no fp32 tensor: torch casts loaded state to the parameter's type, so state of a
        16-bit parameter would lose its precision on every resume.

        Raises:
            ValueError: naming its shape and type.
        """
        if param.dtype != torch.float32:
            raise ValueError(
                f"{type(self).__name__} steps on fp32 master weights; got a parameter of shape {tuple(param.shape)} "
                f"and {param.dtype}: give it the fp32 copy of that parameter"
            )

    def init_state(self, param: Tensor) -> None:
        """Allocate the state of one parameter, all zeros. Buffers that exist stay, as do those of others.

        Raises:
            ValueError: the optimizer cannot step on this parameter.
        """
        self.check_parameter(param)
        state = self.state[param]
        if self.COUNTS_STEPS:
            state.setdefault("step", torch.zeros((), dtype=torch.float32))
        for name, shape in shapes(self.STATE, tuple(param.shape)).items():
            if name not in state:
                state[name] = torch.zeros(shape, dtype=torch.float32, device=param.device)

    def init_states(self) -> None:
        """Allocate the state of every parameter."""
        for group in self.param_groups:
            EagerState._init_group(self, group, skip_non_grad_params=False)

    def _init_group(self, group: Group, skip_non_grad_params: bool = True) -> None:
        # Megatron and emerging-optimizers call it by this name.
        for param in group["params"]:
            if param.grad is not None or not skip_non_grad_params:
                self.init_state(param)


class StepwiseOptimizer(EagerState, torch.optim.Optimizer):
    """Base of optimizers that step a parameter group at once; subclasses write `update`.

    Args:
        params: fp32 parameters.
        values: hyper-parameters, see the class in `HYPERPARAMETERS`.

    Raises:
        ValueError: naming each hyper-parameter outside its range.
    """

    HYPERPARAMETERS: ClassVar[type[Hyperparameters]]

    def __init__(self, params: ParamsT, **values: Any) -> None:
        self.hyperparameters = self.HYPERPARAMETERS(**values)
        super().__init__(params, self.hyperparameters.group_values())

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step the parameters that have a gradient. A closure computes the loss and the gradients, as for torch."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._init_group(group)
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                self.update(params, [param.grad for param in params if param.grad is not None], group)
        return loss

    def update(self, params: list[Tensor], grads: list[Tensor], group: Group) -> None:
        """Step the given parameters, which all have state."""
        raise NotImplementedError

    def buffers(self, params: list[Tensor], name: str) -> list[Tensor]:
        """The state called `name` of each parameter."""
        return [self.state[param][name] for param in params]

    def next_steps(self, params: list[Tensor]) -> list[int]:
        """Count a step for each parameter and return the counts, the first being 1."""
        steps = self.buffers(params, "step")
        torch._foreach_add_(steps, 1.0)
        return [int(step) for step in steps]
