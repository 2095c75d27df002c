# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""MARS with AdamW's moments, arXiv 2411.10438, in its approximate form (one gradient a step).

    C = G + gamma beta1 / (1 - beta1) (G - G_last)         variance reduction
    C = C / max(1, ||C||)                                  norm of the whole tensor
    m = beta1 m + (1 - beta1) C
    v = beta2 v + (1 - beta2) C C
    W = (1 - lr wd) W - lr m^ / (sqrt(v^) + eps)           m^ = m / (1 - beta1^t), v^ likewise

Parameters of one axis take plain AdamW with betas of their own. G_last starts at zero, as in the authors'
code (https://github.com/AGI-Arena/MARS). Under a gradient delay G and G_last are neighbors in the delayed
stream.
"""

from typing import ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_async.optim.algorithms import ranges
from megatron_async.optim.algorithms.ranges import Rule
from megatron_async.optim.algorithms.state import Group, Shape, StepwiseOptimizer, gradients


def reduce_variance(grad: Tensor, last: Tensor, *, gamma: float, beta: float) -> Tensor:
    """The corrected gradient C, before clipping. A new tensor; the arguments stay as they are."""
    return torch.add(grad, grad - last, alpha=gamma * beta / (1 - beta))


def clip_to_unit_norm(x: Tensor, squared_norm: Tensor) -> Tensor:
    """Scale ``x`` down (in place) if its norm is above 1, without asking the device for the norm."""
    return x.div_(squared_norm.sqrt().clamp_min(1.0))


class Mars(StepwiseOptimizer):
    """MARS-AdamW.

    The norm and the choice by axes are those of the whole tensor: a sharded version overrides
    :meth:`squared_norm` and :meth:`reduces_variance`.

    Args:
        params: fp32 parameters.
        lr: learning rate; the authors use 6e-3, 3e-3 and 2e-3 for GPT-2 small, medium and large.
        betas: of the moments, (0.95, 0.99) in the paper.
        eps: added to the root of the second moment.
        weight_decay: decoupled; a step multiplies the weights by 1 - lr * weight_decay.
        gamma: strength of the variance reduction, 0.025 in the paper; 0 leaves AdamW with clipping by tensor.
        betas_1d: AdamW's for parameters of one axis, (0.9, 0.95) in the authors' code.

    Raises:
        ValueError: listing every hyper-parameter outside its range.
    """

    counts_steps = True

    RULES: ClassVar[dict[str, Rule]] = {
        "lr": ranges.NON_NEGATIVE,
        "betas": ranges.Several(2, ranges.DECAY),
        "eps": ranges.POSITIVE,
        "weight_decay": ranges.NON_NEGATIVE,
        "gamma": ranges.NON_NEGATIVE,
        "betas_1d": ranges.Several(2, ranges.DECAY),
    }

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.95, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        gamma: float = 0.025,
        betas_1d: tuple[float, float] = (0.9, 0.95),
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "gamma": gamma,
            "betas_1d": betas_1d,
        }
        ranges.check("Mars", self.RULES, defaults)
        super().__init__(params, defaults)

    def state_shapes(self, param: Tensor) -> dict[str, Shape]:
        shape = tuple(param.shape)
        moments = {"exp_avg": shape, "exp_avg_sq": shape}
        return {**moments, "last_grad": shape} if self.reduces_variance(param) else moments

    def reduces_variance(self, param: Tensor) -> bool:
        """Hook: whether MARS or plain AdamW steps this parameter."""
        return param.ndim >= 2

    def squared_norm(self, param: Tensor, x: Tensor) -> Tensor:
        """Hook: squared norm of the whole tensor of which ``x`` is this rank's part."""
        return x.square().sum()

    def update(self, params: list[Tensor], group: Group) -> None:
        for param, grad, step in zip(params, gradients(params), self.next_steps(params), strict=True):
            state = self.state[param]
            beta1, beta2 = group["betas"] if self.reduces_variance(param) else group["betas_1d"]
            if self.reduces_variance(param):
                corrected = reduce_variance(grad, state["last_grad"], gamma=group["gamma"], beta=beta1)
                state["last_grad"].copy_(grad)
                grad = clip_to_unit_norm(corrected, self.squared_norm(param, corrected))
            state["exp_avg"].lerp_(grad, 1 - beta1)
            state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            root = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
            param.mul_(1 - group["lr"] * group["weight_decay"])
            param.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - beta1**step))
