# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Adam with a delay of its first moment alone (arXiv 2606.30634, A.8 and table 8), for the one-process oracle."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_async.optim.corrections.pieces import step_in_pieces


class DelayedFirstMoment:
    """Makes an AdamW take its second moment from other gradients than its first.

        m = beta1 m + (1 - beta1) G_stale
        v = beta2 v + (1 - beta2) G_fresh^2

    Args:
        optimizer: an AdamW; its `step` is replaced, hooks stay.

    Raises:
        ValueError: it is another optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, torch.optim.AdamW):
            raise ValueError(f"a delay of the first moment alone needs torch's AdamW, not {type(optimizer).__name__}")
        self._optimizer = optimizer
        step_in_pieces(optimizer, part=None)  # `fresh` knows whole parameters
        self.fresh: Mapping[Tensor, Tensor] = {}
        """Gradients for the second moment, by parameter; where there are none, the parameter's own."""
        optimizer.register_step_pre_hook(self._keep)
        optimizer.register_step_post_hook(self._replace)
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []

    @torch.no_grad()
    def _keep(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param in self.fresh:
                    square = optimizer.state[param].get("exp_avg_sq")
                    zero = torch.zeros_like(param)
                    self._before.append((param, param.detach().clone(), zero if square is None else square.clone()))

    @torch.no_grad()
    def _replace(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Redo the step that has just been made, with the other second moment."""
        groups = {id(param): group for group in optimizer.param_groups for param in group["params"]}
        for param, weights, square in self._before:
            group, state, fresh = groups[id(param)], optimizer.state[param], self.fresh[param]
            beta1, beta2 = group["betas"]
            step = float(state["step"])
            state["exp_avg_sq"].copy_(square.mul_(beta2).addcmul_(fresh, fresh, value=1 - beta2))
            root = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
            weights.mul_(1 - group["lr"] * group["weight_decay"])
            weights.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - beta1**step))
            param.detach().copy_(weights)
        self._before = []
