# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""NorMuon, arXiv 2510.05491, algorithm 1: Muon with one adaptive step size for each neuron (row).

    M = mu M + (1 - mu) G
    O = orthogonalize(mu M + (1 - mu) G  with Nesterov momentum, else M)
    v = beta2 v + (1 - beta2) mean over columns (O O)      one value a row
    N = O / (sqrt(v) + eps)
    W = (1 - lr wd) W - lr 0.2 sqrt(rows columns) / ||N||_F N

No bias correction of v: it is one factor for the whole matrix, and the last line removes it.
emerging-optimizers' variant keeps one value a column when there are fewer rows than columns; here it is
always the row, an output neuron. Zero gradients move the weights by weight decay alone.
"""

from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_async.optim.algorithms.muon import Coefficients, Precision
from megatron_async.optim.algorithms.second_moment import SecondMomentMuon
from megatron_async.optim.algorithms.state import Shape


def neuron_mean_square(update: Tensor) -> Tensor:
    """Mean square of each row of a (..., columns) update, shape (..., 1)."""
    return update.square().mean(dim=-1, keepdim=True)


def divide_by_neuron_rms(update: Tensor, moment2: Tensor, mean_square: Tensor, *, beta2: float, eps: float) -> Tensor:
    """Take this step's mean squares into ``moment2`` (in place, (..., 1)) and divide each row by its root."""
    moment2.lerp_(mean_square, 1 - beta2)
    return update / (moment2.sqrt() + eps)


class NorMuon(SecondMomentMuon):
    """NorMuon.

    Args:
        params: 2-D fp32 parameters of shape (outputs, inputs).
        lr: learning rate; an update has root mean square 0.2 lr in every shape.
        momentum: mu, as in Muon.
        weight_decay: decoupled; a step multiplies the weights by 1 - lr * weight_decay.
        nesterov: on as in the authors' code (https://github.com/zichongli5/NorMuon); arXiv 2606.30634 (A.1)
            finds that it clearly helps NorMuon under delay.
        coefficient_type: as in Muon.
        num_ns_steps: as in Muon.
        fp32_matmul_prec: as in Muon.
        beta2: of the second moment; 0.95 in the authors' code.
        eps: added to the root of the second moment, 1e-8 as in https://github.com/microsoft/dion.

    Raises:
        ValueError: listing every hyper-parameter outside its range.
    """

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        nesterov: bool = True,
        coefficient_type: Coefficients = "quintic",
        num_ns_steps: int = 5,
        fp32_matmul_prec: Precision = "medium",
        beta2: float = 0.95,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            nesterov=nesterov,
            coefficient_type=coefficient_type,
            num_ns_steps=num_ns_steps,
            fp32_matmul_prec=fp32_matmul_prec,
            beta2=beta2,
            eps=eps,
        )

    def state_shapes(self, param: Tensor) -> dict[str, Shape]:
        return {**super().state_shapes(param), "moment2_buffer": (param.shape[0], 1)}

    def even_out(self, p: Tensor, update: Tensor, moment2: Tensor, *, beta2: float, eps: float) -> Tensor:
        row_mean = self.shard_mean(p, neuron_mean_square(update), within_rows=True)
        return divide_by_neuron_rms(update, moment2, row_mean, beta2=beta2, eps=eps)
