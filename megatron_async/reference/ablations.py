# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Adam with a delay of its first moment alone (arXiv 2606.30634, A.8 and table 8)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_async.optim.step import Piece, StepContext


class DelayedFirstMomentStep:
    """The part of a step in which AdamW steps, with its second moment taken from other gradients than its first.

    m = beta1 m + (1 - beta1) G_stale
    v = beta2 v + (1 - beta2) G_fresh^2
    """

    def __init__(self) -> None:
        self.fresh: Mapping[Tensor, Tensor] = {}
        """Gradients for the second moment by parameter; a parameter without one uses its own gradient."""

    def __call__(self, piece: Piece, context: StepContext) -> None:
        """Let AdamW step, then redo the step with the other second moment.

        Raises:
            ValueError: another optimizer.
        """
        optimizer = piece.optimizer
        if not isinstance(optimizer, torch.optim.AdamW):
            raise ValueError(f"a delay of the first moment alone needs torch's AdamW, not {type(optimizer).__name__}")
        before = [
            (param, param.detach().clone(), _second_moment(optimizer, param))
            for param in piece.params
            if param in self.fresh
        ]
        optimizer.step()
        groups = {id(param): group for group in optimizer.param_groups for param in group["params"]}
        for param, weights, square in before:
            group, state, fresh = groups[id(param)], optimizer.state[param], self.fresh[param]
            beta1, beta2 = group["betas"]
            step = float(state["step"])
            state["exp_avg_sq"].copy_(square.mul_(beta2).addcmul_(fresh, fresh, value=1 - beta2))
            root = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
            weights.mul_(1 - group["lr"] * group["weight_decay"])
            weights.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - beta1**step))
            param.detach().copy_(weights)


def _second_moment(optimizer: torch.optim.Optimizer, param: Tensor) -> Tensor:
    square = optimizer.state[param].get("exp_avg_sq")
    return torch.zeros_like(param) if square is None else square.clone()
