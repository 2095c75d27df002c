# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""SOAP, arXiv 2409.11321: Adam in the eigenbasis of Shampoo's factors, refreshed every few steps.

First step: L = (1 - beta) G G^T, R = (1 - beta) G^T G, their eigenvectors Q_L, Q_R; the weights stay as they
are. After that, with t counting from 1 at the second step:

    m = beta1 m + (1 - beta1) G
    v = beta2 v + (1 - beta2) (Q_L^T G Q_R)^2
    U = Q_L [ (Q_L^T m^ Q_R) / (sqrt(v^) + eps) ] Q_R^T    m^ = m / (1 - beta1^t), v^ likewise
    W = (1 - lr wd) W - lr U
    L = beta L + (1 - beta) G G^T, R = beta R + (1 - beta) G^T G
    every precondition_frequency steps: Q_L = QR(L Q_L), Q_R = QR(R Q_R), columns in order of eigenvalue

The factors' steps and products are emerging-optimizers'; its SOAP class is not used, because it refreshes the
basis in every step, before the gradient is projected. In its first step the gradient is then diagonal in the
basis, and Adam turns the rounding errors beside the diagonal into steps of full size: hence the step that
only measures.
"""

from typing import ClassVar, cast

import torch
from emerging_optimizers.soap import soap_utils
from emerging_optimizers.soap.soap import precondition, update_kronecker_factors
from emerging_optimizers.utils import fp32_matmul_precision
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_async.optim.algorithms import ranges
from megatron_async.optim.algorithms.muon import Precision
from megatron_async.optim.algorithms.ranges import Rule
from megatron_async.optim.algorithms.state import Group, Shape, StepwiseOptimizer, gradients


def rotate(x: Tensor, bases: list[Tensor]) -> Tensor:
    """Q_L^T x Q_R: a matrix in the eigenbasis."""
    return cast(Tensor, precondition(x, bases, dims=[[0], [0]]))


def rotate_back(x: Tensor, bases: list[Tensor]) -> Tensor:
    """Q_L x Q_R^T: a matrix of the eigenbasis in the parameter's own."""
    return cast(Tensor, precondition(x, bases, dims=[[0], [1]]))


class Soap(StepwiseOptimizer):
    """SOAP.

    Args:
        params: 2-D fp32 parameters. The factors and bases have rows^2 and columns^2 elements and cost
            rows^3 + columns^3 to refresh: meant for hidden matrices, not for embeddings.
        lr: learning rate; 3e-3 in the paper.
        betas: of Adam's moments, (0.95, 0.95) in the paper.
        shampoo_beta: beta of the factors, the paper's is Adam's beta2.
        eps: added to the root of the second moment.
        weight_decay: decoupled; a step multiplies the weights by 1 - lr * weight_decay, but not the
            first.
        precondition_frequency: steps between refreshes of the basis, 10 in the paper. Longer intervals widen
            the gap to the synchronous run slightly (arXiv 2606.30634, A.1).
        fp32_matmul_prec: precision of the products and of QR; "high" is TF32 where the device has it.

    Raises:
        ValueError: listing every hyper-parameter outside its range.
    """

    counts_steps = True

    RULES: ClassVar[dict[str, Rule]] = {
        "lr": ranges.NON_NEGATIVE,
        "betas": ranges.Several(2, ranges.DECAY),
        "shampoo_beta": ranges.DECAY,
        "eps": ranges.POSITIVE,
        "weight_decay": ranges.NON_NEGATIVE,
        "precondition_frequency": ranges.Count(1),
        "fp32_matmul_prec": ranges.Choice(("highest", "high", "medium")),
    }

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        shampoo_beta: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        precondition_frequency: int = 10,
        fp32_matmul_prec: Precision = "high",
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "shampoo_beta": shampoo_beta,
            "eps": eps,
            "weight_decay": weight_decay,
            "precondition_frequency": precondition_frequency,
        }
        ranges.check("Soap", self.RULES, {**defaults, "fp32_matmul_prec": fp32_matmul_prec})
        self.fp32_matmul_prec = fp32_matmul_prec
        super().__init__(params, defaults)

    def state_shapes(self, param: Tensor) -> dict[str, Shape]:
        if param.ndim != 2:
            raise ValueError(f"Soap steps on matrices; got a parameter of shape {tuple(param.shape)}: give it to AdamW")
        rows, columns = param.shape
        moments = {"exp_avg": (rows, columns), "exp_avg_sq": (rows, columns)}
        left, right = (rows, rows), (columns, columns)
        return {**moments, "L": left, "R": right, "Q_L": left, "Q_R": right}

    def update(self, params: list[Tensor], group: Group) -> None:
        with fp32_matmul_precision(self.fp32_matmul_prec):
            for param, grad, step in zip(params, gradients(params), self.next_steps(params), strict=True):
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
        update = rotate_back(rotate(state["exp_avg"], bases) / root, bases)
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
