# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Base of NorMuon and AdaMuon: the orthogonalized update O is divided by the root of its second moment v and then
brought to one size.

    N = O / (√v + eps)
    W = (1 - lr wd) W - lr 0.2 √(rows columns) / ‖N‖ N

A bias correction of v would be one factor for the whole matrix, which the last line removes: there is none.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_async.optim.algorithms.muon import RMS, Muon
from megatron_async.optim.layout import Layout, layout_of


def align_rms(update: Tensor, mean_square: Tensor) -> Tensor:
    """Scale an update (..., columns) to a root mean square of 0.2, given its mean square; zeros stay zeros."""
    return update * (RMS * mean_square.clamp_min(torch.finfo(update.dtype).tiny).rsqrt())


class SecondMomentMuon(Muon):
    """Muon with a second moment of its update, `moment2_buffer` in the state."""

    def scale(self, rows: int, columns: int) -> float:
        return 1.0  # align_rms sets the size

    def mean_square(self, update: Tensor, layout: Layout) -> Tensor:
        """The squares of one matrix of an update, averaged as its second moment is."""
        raise NotImplementedError

    @torch.no_grad()
    def orthogonalize(self, p: Tensor, grad: Tensor, **group: Any) -> Tensor:
        layout, update = layout_of(p), super().orthogonalize(p, grad, **group)
        moments = layout.matrices(self.state[p]["moment2_buffer"])
        for matrix, moment in zip(layout.matrices(update), moments, strict=True):
            moment.lerp_(self.mean_square(matrix, layout), 1 - group["beta2"])
            even = matrix / (moment.sqrt() + group["eps"])
            matrix.copy_(align_rms(even, layout.mean(even.square().mean())))
        return update
