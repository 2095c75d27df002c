# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""SOAP: Adam in the eigenbasis of Shampoo's factors; the first step only measures.

    m = beta1 m + (1 - beta1) G
    v = beta2 v + (1 - beta2) (Q_Lᵀ G Q_R)²
    W = (1 - lr wd) W - lr Q_L [Q_Lᵀ m̂ Q_R / (√v̂ + eps)] Q_Rᵀ
    L = beta L + (1 - beta) G Gᵀ, R = beta R + (1 - beta) Gᵀ G
    every few steps: Q_L = QR(L Q_L), Q_R = QR(R Q_R)

Vanilla SOAP, not KL-Shampoo. The first step computes the factors and their eigenvectors and leaves the weights as they
are, without decay too; m̂ and v̂ count from the second step. Columns of a basis are in order of eigenvalue.
Learning rate: near AdamW's (the paper, E); 3e-3 in arXiv 2409.11321.
Links: https://arxiv.org/abs/2409.11321, https://github.com/nikhilvyas/SOAP
"""

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from emerging_optimizers.soap import soap_utils
from emerging_optimizers.soap.soap import precondition, update_kronecker_factors
from emerging_optimizers.utils import fp32_matmul_precision
from torch import Tensor

from megatron_async.optim.algorithms.muon import Precision, require_matrices
from megatron_async.optim.hyperparameters import COUNT, DECAY, RATES, Hyperparameters, epsilon, hyperparameter, literal
from megatron_async.optim.registry import OptimizerSpec, register
from megatron_async.optim.state import Group, State, StepwiseOptimizer


@dataclass(frozen=True, kw_only=True)
class SoapHyperparameters(Hyperparameters):
    betas: tuple[float, float] = hyperparameter(
        (0.95, 0.95), RATES, "rates of the first and second moment", "arXiv 2409.11321"
    )
    shampoo_beta: float = hyperparameter(0.95, DECAY, "rate of the factors", "arXiv 2409.11321: Adam's beta2")
    eps: float = epsilon()
    precondition_frequency: int = hyperparameter(
        10,
        COUNT,
        "steps between refreshes of the basis",
        "arXiv 2409.11321; longer widens the gap slightly (the paper, A.1)",
    )
    fp32_matmul_prec: Precision = literal(
        Precision,
        "high",
        "precision of the products and of QR; high is TF32 where the device has it",
        "emerging-optimizers' default",
    )


def rotate(x: Tensor, bases: list[Tensor], *, back: bool = False) -> Tensor:
    """Q_L^T x Q_R, a matrix in the eigenbasis; `back`: Q_L x Q_R^T, one of the eigenbasis in the parameter's own."""
    return cast(Tensor, precondition(x, bases, dims=[[0], [int(back)]]))


class Soap(StepwiseOptimizer):
    """SOAP, for (rows, columns) matrices. Factors and bases cost rows^3 + columns^3 to refresh.

    The factors' steps and products are emerging-optimizers'. Its SOAP class is not used, because it refreshes the
    basis in every step before it projects the gradient: in the first step the gradient is then diagonal in the basis,
    and Adam turns the rounding errors beside the diagonal into steps of full size.
    """

    HYPERPARAMETERS = SoapHyperparameters
    STATE: ClassVar[State] = {
        "exp_avg": "element",
        "exp_avg_sq": "element",
        "L": "left",
        "R": "right",
        "Q_L": "left",
        "Q_R": "right",
    }
    COUNTS_STEPS = True
    hyperparameters: SoapHyperparameters

    def check_parameter(self, param: Tensor) -> None:
        super().check_parameter(param)
        require_matrices("Soap", param)

    def update(self, params: list[Tensor], grads: list[Tensor], group: Group) -> None:
        with fp32_matmul_precision(self.hyperparameters.fp32_matmul_prec):
            for param, grad, step in zip(params, grads, self.next_steps(params), strict=True):
                if step > 1:
                    self._step_matrix(param, grad, step - 1, group)
                self._measure(param, grad, step - 1, group)

    def _step_matrix(self, param: Tensor, grad: Tensor, count: int, group: Group) -> None:
        state = self.state[param]
        bases = [state["Q_L"], state["Q_R"]]
        beta1, beta2 = group["betas"]
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].lerp_(rotate(grad, bases).square(), 1 - beta2)
        root = (state["exp_avg_sq"] / (1 - beta2**count)).sqrt_().add_(group["eps"])
        update = rotate(rotate(state["exp_avg"], bases) / root, bases, back=True)
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(update, alpha=-group["lr"] / (1 - beta1**count))

    def _measure(self, param: Tensor, grad: Tensor, count: int, group: Group) -> None:
        """Take the gradient into the factors, and refresh the basis when it is time."""
        state = self.state[param]
        factors, bases = [state["L"], state["R"]], [state["Q_L"], state["Q_R"]]
        update_kronecker_factors(factors, grad, group["shampoo_beta"])
        if count == 0:
            refreshed = soap_utils.get_eigenbasis_eigh(factors)
        elif count % group["precondition_frequency"] == 0:
            # The second moment belongs to the basis' columns and is put in their new order.
            ordered, moment2 = soap_utils.sort_eigenbasis_by_approx_eigvals(factors, bases, state["exp_avg_sq"])
            state["exp_avg_sq"].copy_(moment2)
            refreshed = soap_utils.get_eigenbasis_qr(factors, ordered)
        else:
            return
        torch._foreach_copy_(bases, refreshed)


register(OptimizerSpec("soap", Soap, SoapHyperparameters, Soap.STATE, __doc__, scope="matrix"))
