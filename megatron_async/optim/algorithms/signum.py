# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Signum, arXiv 1802.04434: the sign of the momentum.

    m = mu m + (1 - mu) G
    W = (1 - lr wd) W - lr sign(m)

Lion without the second rate. Where the momentum is exactly zero the sign is zero.
"""

from typing import ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_async.optim.algorithms import ranges
from megatron_async.optim.algorithms.ranges import Rule
from megatron_async.optim.algorithms.state import Group, Shape, StepwiseOptimizer, gradients


class Signum(StepwiseOptimizer):
    """Signum.

    Args:
        params: fp32 parameters.
        lr: learning rate, the size of every element's step.
        momentum: mu, the weight of the past in the moving average. Its authors use 0.9; the default is
            Muon's, because arXiv 2606.30634 (section 2.2) finds more momentum better under delay.
        weight_decay: decoupled; a step multiplies the weights by 1 - lr * weight_decay.

    Raises:
        ValueError: listing every hyper-parameter outside its range.
    """

    RULES: ClassVar[dict[str, Rule]] = {
        "lr": ranges.NON_NEGATIVE,
        "momentum": ranges.DECAY,
        "weight_decay": ranges.NON_NEGATIVE,
    }

    def __init__(self, params: ParamsT, *, lr: float = 1e-3, momentum: float = 0.95, weight_decay: float = 0.1) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        ranges.check("Signum", self.RULES, defaults)
        super().__init__(params, defaults)

    def state_shapes(self, param: Tensor) -> dict[str, Shape]:
        return {"exp_avg": tuple(param.shape)}

    def update(self, params: list[Tensor], group: Group) -> None:
        means = self.buffers(params, "exp_avg")
        torch._foreach_lerp_(means, gradients(params), 1 - group["momentum"])
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(params, torch._foreach_sign(means), alpha=-group["lr"])
