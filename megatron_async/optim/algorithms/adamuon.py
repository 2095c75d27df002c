# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""AdaMuon, arXiv 2507.11005: Muon of the sign of the momentum, with an adaptive step size for each element.

    M = mu M + (1 - mu) G
    O = orthogonalize(sign(M))
    V = beta2 V + (1 - beta2) O O                          elementwise
    N = O / (sqrt(V) + eps)
    W = (1 - lr wd) W - lr 0.2 sqrt(rows columns) / ||N||_F N

The paper's momentum is a sum, which has the same sign. There is no bias correction of V: it is one factor for
the whole matrix, and the last line removes it. The "adamuon" of emerging-optimizers (and Megatron's
adaptive_muon) has neither the sign nor the last line's alignment. Zero gradients move the weights by weight
decay alone.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_async.optim.algorithms.second_moment import SecondMomentMuon
from megatron_async.optim.algorithms.state import Shape


def divide_by_rms(update: Tensor, moment2: Tensor, *, beta2: float, eps: float) -> Tensor:
    """Take the squares of ``update`` into ``moment2`` (in place, the same shape) and divide by its root."""
    moment2.lerp_(update.square(), 1 - beta2)
    return update / (moment2.sqrt() + eps)


class AdaMuon(SecondMomentMuon):
    """AdaMuon.

    Args:
        params: 2-D fp32 parameters of shape (outputs, inputs).
        lr: learning rate; an update has root mean square 0.2 lr in every shape.
        momentum: mu, as in Muon.
        weight_decay: decoupled; a step multiplies the weights by 1 - lr * weight_decay.
        nesterov: take the sign of mu M + (1 - mu) G; the paper's algorithm does not.
        coefficient_type: as in Muon.
        num_ns_steps: as in Muon.
        fp32_matmul_prec: as in Muon.
        beta2: of the second moment; the paper uses the momentum's rate for it, 0.95.
        eps: added to the root of the second moment, 1e-8 in the paper.

    Raises:
        ValueError: listing every hyper-parameter outside its range.
    """

    def state_shapes(self, param: Tensor) -> dict[str, Shape]:
        return {**super().state_shapes(param), "moment2_buffer": tuple(param.shape)}

    @torch.no_grad()
    def orthogonalize(self, p: Tensor, grad: Tensor, **kwargs: Any) -> Tensor:
        return super().orthogonalize(p, grad.sign(), **kwargs)

    def even_out(self, p: Tensor, update: Tensor, moment2: Tensor, *, beta2: float, eps: float) -> Tensor:
        return divide_by_rms(update, moment2, beta2=beta2, eps=eps)
