# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""How stale an update is: the update of a batch's delayed gradients beside that of its gradients at the newest weights.

Each measurement costs one more forward and backward pass.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

from megatron_async.mcore.optimizer import inner_optimizers

Gradients = dict[Tensor, Tensor]


class Replay:
    """An iterator that can be run over the items of a batch once more."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._kept: list[Any] = []
        self._position = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._position == len(self._kept):
            self._kept.append(next(self._source))
        self._position += 1
        return self._kept[self._position - 1]

    def rewind(self) -> None:
        """The next items are those since the last `forget`, once more."""
        self._position = 0

    def forget(self) -> None:
        """The items so far are not wanted again."""
        self._kept, self._position = [], 0


def staleness(optimizer: MegatronOptimizer, stale: Gradients, fresh: Gradients) -> dict[str, float]:
    """Compare the updates, before any correction, of stale and fresh gradients; nothing is changed."""
    optimizers = [inner.optimizer for inner in inner_optimizers(optimizer)]

    def update(gradients: Gradients) -> list[Tensor]:
        for param, gradient in gradients.items():
            param.grad = gradient
        updates = trial_update(optimizers)
        optimizer.zero_grad()
        return updates

    return compare(update(stale), update(fresh))


@torch.no_grad()
def trial_update(optimizers: Sequence[torch.optim.Optimizer]) -> list[Tensor]:
    """The update that the present gradients would give, before any correction; everything is put back.

    Returns:
        Weights before minus weights after for every parameter, in the optimizers' order.
    """
    params = [param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]]
    weights = [param.detach().clone() for param in params]
    states = [_copy_of_state(optimizer) for optimizer in optimizers]
    for optimizer in optimizers:
        optimizer.step()
    updates = [before - param.detach() for before, param in zip(weights, params, strict=True)]
    for param, before in zip(params, weights, strict=True):
        param.detach().copy_(before)
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.state.clear()
        optimizer.state.update(state)
    return updates


def _copy_of_state(optimizer: torch.optim.Optimizer) -> dict[Tensor, dict[str, Any]]:
    return {
        param: {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}
        for param, state in optimizer.state.items()
    }


def compare(stale: Sequence[Tensor], fresh: Sequence[Tensor]) -> dict[str, float]:
    """Cosine between two updates and the norm of their difference over that of the fresh one.

    arXiv 2606.30634, figures 17 and 18.
    """
    product = sum(float((a * b).sum()) for a, b in zip(stale, fresh, strict=True))
    stale_norm, fresh_norm, difference = (
        sum(float(x.square().sum()) for x in tensors) ** 0.5
        for tensors in (stale, fresh, [a - b for a, b in zip(stale, fresh, strict=True)])
    )
    if not stale_norm or not fresh_norm:
        return {"stale_update_cosine": float("nan"), "stale_update_relative_error": float("nan")}
    return {
        "stale_update_cosine": product / (stale_norm * fresh_norm),
        "stale_update_relative_error": difference / fresh_norm,
    }
