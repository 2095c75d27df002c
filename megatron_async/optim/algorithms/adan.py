# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Adan: moving averages of the gradient, of its change and of their squared sum.

    D = G - G_last
    m = beta1 m + (1 - beta1) G
    d = beta2 d + (1 - beta2) D
    n = beta3 n + (1 - beta3) (G + beta2 D)²
    W = (1 - lr wd) W - lr (m̂ + beta2 d̂) / (√n̂ + eps)

In the first step D is zero. A beta is the weight of the past, as in the authors' code; their paper writes 1 - beta.
Proximal decay divides W by 1 + lr wd after the update, in place of multiplying it by 1 - lr wd before; the difference
is of order (lr wd)² W and lr² wd U. In the paper error feedback does not help Adan.
Learning rate: near AdamW's (the paper, E); its authors advise 5 to 10 times AdamW's.
Links: https://arxiv.org/abs/2208.06677, https://github.com/sail-sg/Adan
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megatron_async.optim.hyperparameters import DECAY, FLAG, Hyperparameters, epsilon, hyperparameter, several
from megatron_async.optim.registry import OptimizerSpec, register
from megatron_async.optim.state import Group, State, StepwiseOptimizer

CODE = "https://github.com/sail-sg/Adan"


@dataclass(frozen=True, kw_only=True)
class AdanHyperparameters(Hyperparameters):
    betas: tuple[float, float, float] = hyperparameter(
        (0.98, 0.92, 0.99),
        several(3, DECAY),
        "rates of the gradient, of its difference and of the second moment",
        f"{CODE}; beta1 0.98 in the paper, E",
    )
    eps: float = epsilon(CODE)
    proximal: bool = hyperparameter(
        False, FLAG, "proximal weight decay", "decoupled like every other optimizer here; the authors' code is proximal"
    )


class Adan(StepwiseOptimizer):
    """Adan, for parameters of any shape."""

    HYPERPARAMETERS = AdanHyperparameters
    STATE: ClassVar[State] = dict.fromkeys(("exp_avg", "exp_avg_diff", "exp_avg_sq", "last_grad"), "element")
    COUNTS_STEPS = True

    def update(self, params: list[Tensor], grads: list[Tensor], group: Group) -> None:
        lr, (beta1, beta2, beta3) = group["lr"], group["betas"]
        steps = self.next_steps(params)
        means, diff_means = self.buffers(params, "exp_avg"), self.buffers(params, "exp_avg_diff")
        squares, last = self.buffers(params, "exp_avg_sq"), self.buffers(params, "last_grad")

        differences = [
            grad - before if step > 1 else torch.zeros_like(grad)
            for grad, before, step in zip(grads, last, steps, strict=True)
        ]
        torch._foreach_copy_(last, grads)
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_lerp_(diff_means, differences, 1 - beta2)
        torch._foreach_mul_(differences, beta2)
        torch._foreach_add_(differences, grads)
        torch._foreach_mul_(squares, beta3)
        torch._foreach_addcmul_(squares, differences, differences, 1 - beta3)

        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, [math.sqrt(1 - beta3**step) for step in steps])
        torch._foreach_add_(roots, group["eps"])
        if not group["proximal"]:
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        torch._foreach_addcdiv_(params, means, roots, [-lr / (1 - beta1**step) for step in steps])
        torch._foreach_addcdiv_(params, diff_means, roots, [-lr * beta2 / (1 - beta2**step) for step in steps])
        if group["proximal"]:
            torch._foreach_div_(params, 1 + lr * group["weight_decay"])


register(OptimizerSpec("adan", Adan, AdanHyperparameters, Adan.STATE, __doc__))
