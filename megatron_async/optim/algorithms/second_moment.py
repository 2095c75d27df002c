# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Base of NorMuon and AdaMuon: the orthogonalized update O is divided by the root of its second moment v and then
brought to one size.

    N = O / (√v + eps)
    W = (1 - lr wd) W - lr 0.2 √(rows columns) / ‖N‖ N

A bias correction of v would be one factor for the whole matrix, which the last line removes: there is none.
"""

import torch
from torch import Tensor

from megatron_async.optim.algorithms.batches import Batch
from megatron_async.optim.algorithms.muon import RMS, Muon
from megatron_async.optim.layout import Layout
from megatron_async.optim.state import Group


def align_rms(update: Tensor, mean_square: Tensor) -> Tensor:
    """Scale an update (..., columns) to a root mean square of 0.2, given its mean square; zeros stay zeros."""
    return update * (RMS * mean_square.clamp_min(torch.finfo(update.dtype).tiny).rsqrt())


class SecondMomentMuon(Muon):
    """Muon with a second moment of its update, `moment2_buffer` in the state."""

    def scale(self, rows: int, columns: int) -> float:
        return 1.0  # align_rms sets the size

    def mean_square(self, update: Tensor, layout: Layout) -> Tensor:
        """The squares of a matrix of each update, averaged as its second moment is."""
        raise NotImplementedError

    def normalize(self, update: Tensor, batch: Batch, group: Group) -> None:
        layout, buffers = batch.layout, batch.state["moment2_buffer"]
        moments = torch.stack(buffers)
        for matrix, moment in zip(layout.matrices(update), layout.matrices(moments), strict=True):
            moment.lerp_(self.mean_square(matrix, layout), 1 - group["beta2"])
            even = matrix / (moment.sqrt() + group["eps"])
            squares = even.square().mean(dim=tuple(range(1, even.ndim)), keepdim=True)
            matrix.copy_(align_rms(even, layout.mean(squares)))
        torch._foreach_copy_(buffers, moments.unbind(0))
