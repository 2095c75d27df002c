# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Ablation: Adam with a delay of its first moment only (arXiv 2606.30634, A.8 and table 8)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_async.optim.algorithms.mars import adamw_step
from megatron_async.optim.step import Piece, StepContext


class DelayedFirstMomentStep:
    """Step of AdamW with fresh gradients for the second moment.

    m = beta1 m + (1 - beta1) G_stale
    v = beta2 v + (1 - beta2) G_fresh^2

    G_fresh is the gradient that a synchronous run would have now, which the delayed run applies one delay later.
    """

    def __init__(self) -> None:
        self.fresh: Mapping[Tensor, Tensor] = {}
        """Fresh gradient of each parameter; parameters without one use their own gradient."""

    def __call__(self, piece: Piece, context: StepContext) -> None:
        """Step AdamW, then redo the update with the fresh second moment.

        Raises:
            ValueError: the optimizer is not AdamW.
        """
        optimizer = piece.optimizer
        if not isinstance(optimizer, torch.optim.AdamW):
            raise ValueError(f"a delay of the first moment only needs torch's AdamW, not {type(optimizer).__name__}")
        before = []
        for param in self.fresh.keys() & piece.params:
            square = optimizer.state[param].get("exp_avg_sq")
            square = torch.zeros_like(param) if square is None else square.clone()
            before.append((param, param.detach().clone(), square))
        optimizer.step()
        groups = {param: group for group in optimizer.param_groups for param in group["params"]}
        for param, weights, square in before:
            group, state, fresh = groups[param], optimizer.state[param], self.fresh[param]
            beta2 = group["betas"][1]
            state["exp_avg_sq"].copy_(square.mul_(beta2).addcmul_(fresh, fresh, value=1 - beta2))
            adamw_step(weights, state, group, group["betas"], float(state["step"]))
            param.detach().copy_(weights)
