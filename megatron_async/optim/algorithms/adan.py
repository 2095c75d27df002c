# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Adan, arXiv 2208.06677, in the convention of its code (https://github.com/sail-sg/Adan): a beta is the
weight of the past.

    D = G - G_last                                         zero in the first step
    m = beta1 m + (1 - beta1) G
    d = beta2 d + (1 - beta2) D
    n = beta3 n + (1 - beta3) (G + beta2 D)^2
    U = (m^ + beta2 d^) / (sqrt(n^) + eps)                 m^ = m / (1 - beta1^t), d^ and n^ likewise
    W = (1 - lr wd) W - lr U                               decoupled decay, the default here
    W = (W - lr U) / (1 + lr wd)                           proximal decay, the default of its code

The two decays differ by terms of order (lr wd)^2 and lr^2 wd; the decoupled one is what every other optimizer
here does. Under a gradient delay G and G_last are neighbors in the delayed stream.
"""

import math
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_async.optim.algorithms import ranges
from megatron_async.optim.algorithms.ranges import Rule
from megatron_async.optim.algorithms.state import Group, Shape, StepwiseOptimizer, gradients


class Adan(StepwiseOptimizer):
    """Adan.

    Args:
        params: fp32 parameters.
        lr: learning rate; its authors advise 5 to 10 times AdamW's.
        betas: of the gradient, of its difference and of the second moment; (0.98, 0.92, 0.99) in its code,
            and beta1 0.98 in arXiv 2606.30634 (appendix E).
        eps: added to the root of the second moment.
        weight_decay: see ``proximal``.
        proximal: divide the weights by 1 + lr * weight_decay after the update, in place of multiplying them
            by 1 - lr * weight_decay before it.

    Raises:
        ValueError: listing every hyper-parameter outside its range.
    """

    counts_steps = True

    RULES: ClassVar[dict[str, Rule]] = {
        "lr": ranges.NON_NEGATIVE,
        "betas": ranges.Several(3, ranges.DECAY),
        "eps": ranges.POSITIVE,
        "weight_decay": ranges.NON_NEGATIVE,
        "proximal": ranges.FLAG,
    }

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float, float] = (0.98, 0.92, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        proximal: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "proximal": proximal}
        ranges.check("Adan", self.RULES, defaults)
        super().__init__(params, defaults)

    def state_shapes(self, param: Tensor) -> dict[str, Shape]:
        shape = tuple(param.shape)
        return {"exp_avg": shape, "exp_avg_diff": shape, "exp_avg_sq": shape, "last_grad": shape}

    def update(self, params: list[Tensor], group: Group) -> None:
        lr, (beta1, beta2, beta3) = group["lr"], group["betas"]
        grads, steps = gradients(params), self.next_steps(params)
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
