# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""NorMuon: Muon with an adaptive step size for each neuron (row).

    M = mu M + (1 - mu) G
    O = orthogonalize(mu M + (1 - mu) G)
    v = beta2 v + (1 - beta2) mean over columns (O²)
    N = O / (√v + eps)
    W = (1 - lr wd) W - lr 0.2 √(rows columns) / ‖N‖ N

Without Nesterov momentum M is orthogonalized. There is one second moment a row in every shape; emerging-optimizers'
variant takes columns where there are fewer rows than columns.
Learning rate: near AdamW's (the paper, E).
Links: https://arxiv.org/abs/2510.05491, https://github.com/zichongli5/NorMuon
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from megatron_async.optim.algorithms.muon import NewtonSchulzHyperparameters
from megatron_async.optim.algorithms.second_moment import SecondMomentMuon
from megatron_async.optim.hyperparameters import DECAY, FLAG, epsilon, hyperparameter
from megatron_async.optim.layout import Layout
from megatron_async.optim.registry import OptimizerSpec, register
from megatron_async.optim.state import State


@dataclass(frozen=True, kw_only=True)
class NorMuonHyperparameters(NewtonSchulzHyperparameters):
    nesterov: bool = hyperparameter(
        True, FLAG, "Nesterov momentum", "the authors' code; clearly helps NorMuon (the paper, A.1)", in_group=False
    )
    beta2: float = hyperparameter(0.95, DECAY, "rate of the second moment", "the authors' code")
    eps: float = epsilon("https://github.com/microsoft/dion")


class NorMuon(SecondMomentMuon):
    """NorMuon, arXiv 2510.05491, algorithm 1, for matrices as `Muon`."""

    HYPERPARAMETERS = NorMuonHyperparameters
    STATE: ClassVar[State] = {"momentum_buffer": "element", "moment2_buffer": "row"}

    def mean_square(self, update: Tensor, layout: Layout) -> Tensor:
        return layout.mean(update.square().mean(dim=-1, keepdim=True), of_rows=True)


register(OptimizerSpec("normuon", NorMuon, NorMuonHyperparameters, NorMuon.STATE, __doc__, scope="matrix"))
