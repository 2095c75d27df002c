# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""What NorMuon and AdaMuon share: a second moment of the orthogonalized update evens it out, and the result is
brought to one size.

    N = O / (sqrt(v) + eps)                                v of rows or of elements, by the subclass
    W = (1 - lr wd) W - lr 0.2 sqrt(rows columns) / ||N||_F N

There is no bias correction of v: it is one factor for the whole matrix, and the last line removes it.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_async.optim.algorithms import ranges
from megatron_async.optim.algorithms.muon import Coefficients, Muon, Precision, align_rms
from megatron_async.optim.algorithms.ranges import Rule


class SecondMomentMuon(Muon):
    """Muon with a second moment of its update, ``moment2_buffer`` in the state.

    Args:
        params: 2-D fp32 parameters of shape (outputs, inputs).
        lr: learning rate; an update has root mean square 0.2 lr in every shape.
        momentum: mu, as in Muon.
        weight_decay: decoupled; a step multiplies the weights by 1 - lr * weight_decay.
        nesterov: as in Muon.
        coefficient_type: as in Muon.
        num_ns_steps: as in Muon.
        fp32_matmul_prec: as in Muon.
        beta2: of the second moment.
        eps: added to the root of the second moment.

    Raises:
        ValueError: listing every hyper-parameter outside its range.
    """

    RULES: ClassVar[dict[str, Rule]] = {
        **{name: rule for name, rule in Muon.RULES.items() if name != "scale_mode"},
        "beta2": ranges.DECAY,
        "eps": ranges.POSITIVE,
    }
    GROUP_EXTRAS: ClassVar[tuple[str, ...]] = ("beta2", "eps")

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        nesterov: bool = False,
        coefficient_type: Coefficients = "quintic",
        num_ns_steps: int = 5,
        fp32_matmul_prec: Precision = "medium",
        beta2: float = 0.95,
        eps: float = 1e-8,
    ) -> None:
        values = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "coefficient_type": coefficient_type,
            "num_ns_steps": num_ns_steps,
            "fp32_matmul_prec": fp32_matmul_prec,
            "beta2": beta2,
            "eps": eps,
        }
        self._construct(params, values)

    def scale(self, rows: int, columns: int) -> float:
        return 1.0  # align_rms sets the size

    def even_out(self, p: Tensor, update: Tensor, moment2: Tensor, *, beta2: float, eps: float) -> Tensor:
        """Take a block of an update into its part of the second moment (in place) and divide by the root of that."""
        raise NotImplementedError

    @torch.no_grad()
    def orthogonalize(self, p: Tensor, grad: Tensor, **kwargs: Any) -> Tensor:
        update = super().orthogonalize(p, grad, **kwargs)
        moment2s = self.blocks(p, self.state[p]["moment2_buffer"])
        for block, moment2 in zip(self.blocks(p, update), moment2s, strict=True):
            even = self.even_out(p, block, moment2, beta2=kwargs["beta2"], eps=kwargs["eps"])
            block.copy_(align_rms(even, self.shard_mean(p, even.square().mean())))
        return update
