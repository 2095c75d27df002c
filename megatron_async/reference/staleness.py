# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Staleness of an update: its distance from the update that gradients at the newest weights would give.

Each measurement costs one more forward and backward pass.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

from megatron_async.mcore.optimizer import inner_optimizers
from megatron_async.optim.step import clip_factor, only

Gradients = dict[Tensor, Tensor]


@torch.no_grad()
def clipped_gradients(optimizer: MegatronOptimizer, limit: float) -> Gradients:
    """Copies of the optimizer's gradients, clipped by their global norm. Clears the gradients."""
    optimizer.prepare_grads()
    factor = clip_factor(float(optimizer.get_grad_norm()), limit)
    params = [param for inner in inner_optimizers(optimizer) for param in _params(inner.optimizer)]
    gradients = {param: param.grad * factor for param in params if param.grad is not None}
    optimizer.zero_grad()
    return gradients


def staleness(optimizer: MegatronOptimizer, stale: Gradients, fresh: Gradients) -> dict[str, float]:
    """Compare the uncorrected updates of stale and fresh gradients. Weights and optimizer state are restored."""
    optimizers = [inner.optimizer for inner in inner_optimizers(optimizer)]
    updates = []
    for gradients in (stale, fresh):
        for param, gradient in gradients.items():
            param.grad = gradient
        updates.append(trial_update(optimizers))
        optimizer.zero_grad()
    return compare(*updates)


@torch.no_grad()
def trial_update(optimizers: Sequence[torch.optim.Optimizer]) -> list[Tensor]:
    """Uncorrected update (old minus new weights) of each parameter. Weights and optimizer state are restored."""
    params = [param for optimizer in optimizers for param in _params(optimizer)]
    weights = [param.detach().clone() for param in params]
    states = [{param: _copied(state) for param, state in optimizer.state.items()} for optimizer in optimizers]
    for optimizer in optimizers:
        with only(optimizer, [group["params"] for group in optimizer.param_groups]):  # counts no step
            optimizer.step()
    updates = [before - param.detach() for before, param in zip(weights, params, strict=True)]
    for param, before in zip(params, weights, strict=True):
        param.detach().copy_(before)
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.state.clear()
        optimizer.state.update(state)
    return updates


def _params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}


def compare(stale: Sequence[Tensor], fresh: Sequence[Tensor]) -> dict[str, float]:
    """Cosine and relative distance of two updates (arXiv 2606.30634, figures 17 and 18)."""
    pairs = list(zip(stale, fresh, strict=True))
    product = sum(float((a * b).sum()) for a, b in pairs)
    stale_norm, fresh_norm, difference = (
        sum(float(x.square().sum()) for x in tensors) ** 0.5 for tensors in (stale, fresh, [a - b for a, b in pairs])
    )
    defined = stale_norm > 0 and fresh_norm > 0
    return {
        "stale_update_cosine": product / (stale_norm * fresh_norm) if defined else float("nan"),
        "stale_update_relative_error": difference / fresh_norm if defined else float("nan"),
    }
