# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""MARS: AdamW of a variance-reduced gradient, clipped tensor by tensor; AdamW for 1-D parameters.

    C = G + gamma beta1 / (1 - beta1) (G - G_last)
    C = C / max(1, ‖C‖)
    m = beta1 m + (1 - beta1) C
    v = beta2 v + (1 - beta2) C²
    W = (1 - lr wd) W - lr m̂ / (√v̂ + eps)

The approximate form, with one gradient a step. The norm is that of the whole tensor. G_last starts at zero, as in the
authors' code. With gamma 0 it is AdamW with clipping by tensor.
Learning rate: near AdamW's (the paper, E); 6e-3, 3e-3, 2e-3 for GPT-2 S, M, L in arXiv 2411.10438.
Links: https://arxiv.org/abs/2411.10438, https://github.com/AGI-Arena/MARS
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megatron_async.optim.hyperparameters import NON_NEGATIVE, RATES, Hyperparameters, epsilon, hyperparameter
from megatron_async.optim.layout import layout_of
from megatron_async.optim.registry import OptimizerSpec, register
from megatron_async.optim.state import Group, State, StepwiseOptimizer


@dataclass(frozen=True, kw_only=True)
class MarsHyperparameters(Hyperparameters):
    betas: tuple[float, float] = hyperparameter(
        (0.95, 0.99), RATES, "rates of the first and second moment", "arXiv 2411.10438"
    )
    eps: float = epsilon()
    gamma: float = hyperparameter(0.025, NON_NEGATIVE, "strength of the variance reduction", "arXiv 2411.10438")
    betas_1d: tuple[float, float] = hyperparameter(
        (0.9, 0.95), RATES, "AdamW's rates for 1-D parameters", "https://github.com/AGI-Arena/MARS"
    )


def reduce_variance(grad: Tensor, last: Tensor, *, gamma: float, beta: float) -> Tensor:
    """The corrected gradient C, before clipping. A new tensor; the arguments stay as they are."""
    return torch.add(grad, grad - last, alpha=gamma * beta / (1 - beta))


def clip_to_unit_norm(x: Tensor, squared_norm: Tensor) -> Tensor:
    """Scale `x` down (in place) if its norm is above 1, without asking the device for the norm."""
    return x.div_(squared_norm.sqrt().clamp_min(1.0))


def adamw_step(
    param: Tensor, state: Mapping[str, Tensor], group: Group, betas: tuple[float, float], step: float
) -> None:
    """Move a parameter by AdamW's rule, given its moments after so many steps: the last formula of the module."""
    root = (state["exp_avg_sq"] / (1 - betas[1] ** step)).sqrt_().add_(group["eps"])
    param.mul_(1 - group["lr"] * group["weight_decay"])
    param.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - betas[0] ** step))


class Mars(StepwiseOptimizer):
    """MARS-AdamW, for parameters of any shape."""

    HYPERPARAMETERS = MarsHyperparameters
    STATE: ClassVar[State] = {"exp_avg": "element", "exp_avg_sq": "element", "last_grad": "matrix"}
    COUNTS_STEPS = True

    def update(self, params: list[Tensor], grads: list[Tensor], group: Group) -> None:
        for param, grad, step in zip(params, grads, self.next_steps(params), strict=True):
            state = self.state[param]
            beta1, beta2 = group["betas_1d"] if param.ndim < 2 else group["betas"]
            if param.ndim >= 2:
                corrected = reduce_variance(grad, state["last_grad"], gamma=group["gamma"], beta=beta1)
                state["last_grad"].copy_(grad)
                grad = clip_to_unit_norm(corrected, layout_of(param).total(corrected.square().sum()))
            state["exp_avg"].lerp_(grad, 1 - beta1)
            state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            adamw_step(param, state, group, (beta1, beta2), step)


register(OptimizerSpec("mars", Mars, MarsHyperparameters, Mars.STATE, __doc__, scope="tensor"))
