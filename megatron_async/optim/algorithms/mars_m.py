# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""MARS-M: Muon of a variance-reduced gradient.

    C = G + gamma mu / (1 - mu) (G - G_last)
    C = C / max(1, ‖C‖)
    M = mu M + (1 - mu) C
    W = (1 - lr wd) W - lr 0.2 √max(rows, columns) orthogonalize(M)

The approximate form, with one gradient a step and without Nesterov momentum. G_last starts at zero, as in the authors'
code. The norm of a fused weight is that of all its matrices.
Learning rate: near AdamW's (the paper, E).
Links: https://arxiv.org/abs/2510.21800, https://github.com/AGI-Arena/MARS
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megatron_async.optim.algorithms.batches import Batch
from megatron_async.optim.algorithms.mars import clip_to_unit_norm, reduce_variance
from megatron_async.optim.algorithms.muon import Muon, ScaledHyperparameters
from megatron_async.optim.hyperparameters import NON_NEGATIVE, hyperparameter
from megatron_async.optim.registry import OptimizerSpec, register
from megatron_async.optim.state import Group, State


@dataclass(frozen=True, kw_only=True)
class MarsMHyperparameters(ScaledHyperparameters):
    gamma: float = hyperparameter(0.025, NON_NEGATIVE, "strength of the variance reduction", "arXiv 2510.21800's code")


class MarsM(Muon):
    """MARS-M, for matrices as `Muon`."""

    HYPERPARAMETERS = MarsMHyperparameters
    STATE: ClassVar[State] = {"momentum_buffer": "element", "last_grad": "element"}

    def direction(self, batch: Batch, group: Group) -> Tensor:
        momentum, last = batch.state["momentum_buffer"], batch.state["last_grad"]
        stacked = torch.stack(batch.grads), torch.stack(last)
        corrected = reduce_variance(*stacked, gamma=group["gamma"], beta=group["momentum"])
        torch._foreach_copy_(last, batch.grads)
        norms = batch.layout.total(corrected.square().sum(dim=(-2, -1), keepdim=True))
        corrected = clip_to_unit_norm(corrected, norms)
        torch._foreach_lerp_(momentum, corrected.unbind(0), 1 - group["momentum"])
        return torch.stack(momentum)


register(OptimizerSpec("mars-m", MarsM, MarsMHyperparameters, MarsM.STATE, __doc__, scope="matrix"))
