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

import torch
from torch import Tensor

from megatron_async.optim.algorithms.batches import Batch
from megatron_async.optim.algorithms.muon import RMS, Muon, NewtonSchulzHyperparameters
from megatron_async.optim.hyperparameters import DECAY, FLAG, epsilon, hyperparameter
from megatron_async.optim.layout import Layout
from megatron_async.optim.registry import OptimizerSpec, register
from megatron_async.optim.state import Group, State


@dataclass(frozen=True, kw_only=True)
class NorMuonHyperparameters(NewtonSchulzHyperparameters):
    nesterov: bool = hyperparameter(
        True, FLAG, "Nesterov momentum", "the authors' code; clearly helps NorMuon (the paper, A.1)", in_group=False
    )
    beta2: float = hyperparameter(0.95, DECAY, "rate of the second moment", "the authors' code")
    eps: float = epsilon("https://github.com/microsoft/dion")


def align_rms(update: Tensor, mean_square: Tensor) -> Tensor:
    """Scale an update (..., columns) to a root mean square of 0.2, given its mean square; zeros stay zeros."""
    return update * (RMS * mean_square.clamp_min(torch.finfo(update.dtype).tiny).rsqrt())


class NorMuon(Muon):
    """NorMuon, arXiv 2510.05491, algorithm 1, for matrices as `Muon`; the base of AdaMuon.

    A bias correction of v would be one factor for the whole matrix, which the last line removes: there is none.
    """

    HYPERPARAMETERS: ClassVar[type[NewtonSchulzHyperparameters]] = NorMuonHyperparameters
    STATE: ClassVar[State] = {"momentum_buffer": "element", "moment2_buffer": "row"}

    def scale(self, rows: int, columns: int) -> float:
        return 1.0  # align_rms sets the size

    def mean_square(self, update: Tensor, layout: Layout) -> Tensor:
        """The squares of a matrix of each update, averaged as its second moment is."""
        return layout.mean(update.square().mean(dim=-1, keepdim=True), of_rows=True)

    def normalize(self, update: Tensor, batch: Batch, group: Group) -> None:
        layout, buffers = batch.layout, batch.state["moment2_buffer"]
        moments = torch.stack(buffers)
        for matrix, moment in zip(layout.matrices(update), layout.matrices(moments), strict=True):
            moment.lerp_(self.mean_square(matrix, layout), 1 - group["beta2"])
            even = matrix / (moment.sqrt() + group["eps"])
            squares = even.square().mean(dim=tuple(range(1, even.ndim)), keepdim=True)
            matrix.copy_(align_rms(even, layout.mean(squares)))
        torch._foreach_copy_(buffers, moments.unbind(0))


register(OptimizerSpec("normuon", NorMuon, NorMuonHyperparameters, NorMuon.STATE, __doc__, scope="matrix"))
