# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""MARS-M, arXiv 2510.21800, in its approximate form: Muon with the variance-reduced gradient of MARS.

    C = G + gamma mu / (1 - mu) (G - G_last)
    C = C / max(1, ||C||_F)
    M = mu M + (1 - mu) C
    W = (1 - lr wd) W - lr 0.2 sqrt(max(rows, columns)) orthogonalize(M)

G_last starts at zero, as in the authors' code (https://github.com/AGI-Arena/MARS, MARS_M). Gradients that
have always been zero move the weights by weight decay alone. Under a gradient delay G and G_last are
neighbors in the delayed stream.
"""

from collections.abc import Callable
from typing import ClassVar

import torch
from emerging_optimizers.utils import fp32_matmul_precision
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_async.optim.algorithms import ranges
from megatron_async.optim.algorithms.mars import clip_to_unit_norm, reduce_variance
from megatron_async.optim.algorithms.muon import Coefficients, Muon, Precision, ScaleMode
from megatron_async.optim.algorithms.ranges import Rule
from megatron_async.optim.algorithms.state import Group, Shape


class MarsM(Muon):
    """MARS-M. A sharded version also overrides :meth:`squared_norm`.

    Args:
        params: 2-D fp32 parameters of shape (outputs, inputs).
        lr: learning rate.
        momentum: mu, as in Muon.
        weight_decay: decoupled; a step multiplies the weights by 1 - lr * weight_decay.
        coefficient_type: as in Muon.
        num_ns_steps: as in Muon.
        scale_mode: as in Muon.
        fp32_matmul_prec: as in Muon.
        gamma: strength of the variance reduction, 0.025 in the paper.

    Raises:
        ValueError: listing every hyper-parameter outside its range.
    """

    RULES: ClassVar[dict[str, Rule]] = {
        **{name: rule for name, rule in Muon.RULES.items() if name != "nesterov"},
        "gamma": ranges.NON_NEGATIVE,
    }
    GROUP_EXTRAS: ClassVar[tuple[str, ...]] = ("gamma",)

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        coefficient_type: Coefficients = "quintic",
        num_ns_steps: int = 5,
        scale_mode: ScaleMode = "spectral",
        fp32_matmul_prec: Precision = "medium",
        gamma: float = 0.025,
    ) -> None:
        values = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "coefficient_type": coefficient_type,
            "num_ns_steps": num_ns_steps,
            "scale_mode": scale_mode,
            "fp32_matmul_prec": fp32_matmul_prec,
            "gamma": gamma,
        }
        self._construct(params, values)

    def state_shapes(self, param: Tensor) -> dict[str, Shape]:
        return {**super().state_shapes(param), "last_grad": tuple(param.shape)}

    def squared_norm(self, param: Tensor, x: Tensor) -> Tensor:
        """Hook: squared norm of the whole matrix of which ``x`` is this rank's shard."""
        return x.square().sum()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Take one step with the gradients in ``param.grad``; a closure is refused, as in Muon."""
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
        corrected = clip_to_unit_norm(corrected, self.squared_norm(param, corrected))
        state["momentum_buffer"].lerp_(corrected, 1 - group["momentum"])
        hyperparameters = {name: value for name, value in group.items() if name != "params"}
        with fp32_matmul_precision(self.fp32_matmul_prec):
            update = self.orthogonalize(param, state["momentum_buffer"], **hyperparameters)
        self._apply_weight_decay_inplace(param, grad, group["lr"], group["weight_decay"])
        param.add_(update, alpha=-group["lr"])
