# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""AdaMuon: Muon of the momentum's sign with an adaptive step size for each element.

    M = mu M + (1 - mu) G
    O = orthogonalize(sign(M))
    V = beta2 V + (1 - beta2) O²
    N = O / (√V + eps)
    W = (1 - lr wd) W - lr 0.2 √(rows columns) / ‖N‖ N

With Nesterov momentum the sign is that of mu M + (1 - mu) G. The defaults are those of the paper's algorithm. The
authors' public code has no sign, Nesterov momentum and beta2 = 0.999 (`--no-adamuon-sign --adamuon-nesterov
--adamuon-beta2 0.999`); its bias correction of V cancels in the last line. Megatron's adaptive_muon has neither the
sign nor the alignment of the last line.
Learning rate: near AdamW's (the paper, E).
Links: https://arxiv.org/abs/2507.11005, https://github.com/Chongjie-Si/AdaMuon
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from megatron_async.optim.algorithms.batches import Batch
from megatron_async.optim.algorithms.muon import NewtonSchulzHyperparameters
from megatron_async.optim.algorithms.normuon import NorMuon
from megatron_async.optim.hyperparameters import DECAY, FLAG, epsilon, hyperparameter
from megatron_async.optim.layout import Layout
from megatron_async.optim.registry import OptimizerSpec, register
from megatron_async.optim.state import Group, State


@dataclass(frozen=True, kw_only=True)
class AdaMuonHyperparameters(NewtonSchulzHyperparameters):
    sign: bool = hyperparameter(
        True, FLAG, "orthogonalize the momentum's sign", "arXiv 2507.11005; the authors' code has none", in_group=False
    )
    nesterov: bool = hyperparameter(False, FLAG, "Nesterov momentum", "arXiv 2507.11005, the algorithm", in_group=False)
    beta2: float = hyperparameter(0.95, DECAY, "rate of the second moment", "arXiv 2507.11005: the momentum's")
    eps: float = epsilon("arXiv 2507.11005")


class AdaMuon(NorMuon):
    """NorMuon with a second moment of each element. The momentum of the paper is a sum, which has the same sign."""

    HYPERPARAMETERS = AdaMuonHyperparameters
    STATE: ClassVar[State] = {"momentum_buffer": "element", "moment2_buffer": "element"}

    def direction(self, batch: Batch, group: Group) -> Tensor:
        direction = super().direction(batch, group)
        assert isinstance(self.hyperparameters, AdaMuonHyperparameters)
        return direction.sign_() if self.hyperparameters.sign else direction

    def mean_square(self, update: Tensor, layout: Layout) -> Tensor:
        return update.square()


register(OptimizerSpec("adamuon", AdaMuon, AdaMuonHyperparameters, AdaMuon.STATE, __doc__, scope="matrix"))
