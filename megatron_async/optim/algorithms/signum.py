# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Signum: sign of the momentum.

    m = mu m + (1 - mu) G
    W = (1 - lr wd) W - lr sign(m)

Lion with one rate in place of two. The sign of zero is zero.
Learning rate: as Lion's.
Links: https://arxiv.org/abs/1802.04434
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megatron_async.optim.hyperparameters import DECAY, Hyperparameters, hyperparameter
from megatron_async.optim.registry import OptimizerSpec, register
from megatron_async.optim.state import Group, State, StepwiseOptimizer


@dataclass(frozen=True, kw_only=True)
class SignumHyperparameters(Hyperparameters):
    momentum: float = hyperparameter(
        0.95, DECAY, "mu, weight of the past in the moving average", "Muon's; arXiv 1802.04434 uses 0.9"
    )


class Signum(StepwiseOptimizer):
    """Signum, for parameters of any shape."""

    HYPERPARAMETERS = SignumHyperparameters
    STATE: ClassVar[State] = {"exp_avg": "element"}

    def update(self, params: list[Tensor], grads: list[Tensor], group: Group) -> None:
        means = self.buffers(params, "exp_avg")
        torch._foreach_lerp_(means, grads, 1 - group["momentum"])
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(params, torch._foreach_sign(means), alpha=-group["lr"])


register(OptimizerSpec("signum", Signum, SignumHyperparameters, Signum.STATE, __doc__))
