# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Toy: gradient descent with a bound on each element of a step.

    W = (1 - lr wd) W - lr clamp(G, -bound, bound)

Learning rate: any.
Links: https://example.org/toy
"""

from dataclasses import dataclass
from typing import Any

import torch

from megatron_async.optim import registry
from megatron_async.optim.hyperparameters import POSITIVE, Hyperparameters, hyperparameter


@dataclass(frozen=True, kw_only=True)
class ToyHyperparameters(Hyperparameters):
    bound: float = hyperparameter(0.5, POSITIVE, "largest element of a gradient", "nothing")


class Toy(torch.optim.Optimizer):
    """A torch optimizer that knows nothing of this package. Keeps its last step."""

    def __init__(self, params: Any, lr: float, weight_decay: float, bound: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "bound": bound})

    def _init_group(self, group: dict[str, Any], skip_non_grad_params: bool = True) -> None:
        for param in group["params"]:
            self.state[param].setdefault("last", torch.zeros_like(param))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            self._init_group(group)
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["last"].copy_(param.grad.clamp(-group["bound"], group["bound"]))
                    param.mul_(1 - group["lr"] * group["weight_decay"])
                    param.sub_(self.state[param]["last"], alpha=group["lr"])


def add() -> None:
    """Register it, once in a process."""
    if "toy" not in registry.names():
        registry.register(registry.OptimizerSpec("toy", Toy, ToyHyperparameters, {"last": "element"}, __doc__))
