# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""MARS-M: Muon of a variance-reduced gradient.

    C = G + gamma mu / (1 - mu) (G - G_last)
    C = C / max(1, ‖C‖)
    M = mu M + (1 - mu) C
    W = (1 - lr wd) W - lr 0.2 √max(rows, columns) orthogonalize(M)

The approximate form, with one gradient a step and without Nesterov momentum. G_last starts at zero, as in the authors'
code. The norm of a fused weight is that of all its matrices.
Learning rate: near AdamW's (the paper, E).
Links: https://arxiv.org/abs/2510.21800, https://github.com/AGI-Arena/MARS
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from emerging_optimizers.utils import fp32_matmul_precision
from torch import Tensor

from megatron_async.optim.algorithms.mars import clip_to_unit_norm, reduce_variance
from megatron_async.optim.algorithms.muon import Muon, ScaledHyperparameters
from megatron_async.optim.hyperparameters import NON_NEGATIVE, hyperparameter
from megatron_async.optim.layout import layout_of
from megatron_async.optim.registry import OptimizerSpec, register
from megatron_async.optim.state import Group, State


@dataclass(frozen=True, kw_only=True)
class MarsMHyperparameters(ScaledHyperparameters):
    gamma: float = hyperparameter(0.025, NON_NEGATIVE, "strength of the variance reduction", "arXiv 2510.21800's code")


class MarsM(Muon):
    """MARS-M, for matrices as `Muon`."""

    HYPERPARAMETERS = MarsMHyperparameters
    STATE: ClassVar[State] = {"momentum_buffer": "element", "last_grad": "element"}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Take one step with the gradients in `param.grad`; a closure is refused, as in Muon."""
        if closure is not None:
            raise ValueError("MarsM takes no closure: compute the gradients before the step")
        for group in self.param_groups:
            self._init_group(group)
            for param in group["params"]:
                if param.grad is not None:
                    self._step_matrix(param, param.grad, group)

    def _step_matrix(self, param: Tensor, grad: Tensor, group: Group) -> None:
        state = self.state[param]
        corrected = reduce_variance(grad, state["last_grad"], gamma=group["gamma"], beta=group["momentum"])
        state["last_grad"].copy_(grad)
        squares = corrected.square()
        norm = squares.sum() if param.ndim == 2 else squares.sum(dim=(-2, -1), keepdim=True)
        corrected = clip_to_unit_norm(corrected, layout_of(param).total(norm))
        state["momentum_buffer"].lerp_(corrected, 1 - group["momentum"])
        hyperparameters = {name: value for name, value in group.items() if name != "params"}
        with fp32_matmul_precision(self.hyperparameters.fp32_matmul_prec):
            update = self.orthogonalize(param, state["momentum_buffer"], **hyperparameters)
        self._apply_weight_decay_inplace(param, grad, group["lr"], group["weight_decay"])
        param.add_(update, alpha=-group["lr"])


register(OptimizerSpec("mars-m", MarsM, MarsMHyperparameters, MarsM.STATE, __doc__, scope="matrix"))
