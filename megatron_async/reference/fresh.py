# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A batch's gradient taken twice in one process, at older weights and at the newest ones.

For ablations and diagnostics of the emulated delay; each costs one more forward and backward pass.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_async.mcore.optimizer import inner_optimizers, master_params
from megatron_async.optim import statistics
from megatron_async.optim.corrections import Correction

Gradients = dict[torch.Tensor, torch.Tensor]

_CLIP_EPSILON = 1e-6  # Megatron's


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


@contextmanager
def same_random_state() -> Iterator[None]:
    """Leave the random states, Megatron's for tensor parallelism included, as they were found."""
    tracker = tensor_parallel.get_cuda_rng_tracker()
    states = tracker.get_states()
    with torch.random.fork_rng():
        yield
    tracker.set_states(states)


@torch.no_grad()
def clipped(optimizer: MegatronOptimizer, clip_grad: float) -> Gradients:
    """What an optimizer would step with: copies of the gradients of its parameters, clipped by their global norm."""
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    factor = min(1.0, clip_grad / (norm + _CLIP_EPSILON)) if clip_grad > 0 else 1.0
    gradients = {param: param.grad * factor for _, _, param in master_params(optimizer) if param.grad is not None}
    optimizer.zero_grad()
    return gradients


def staleness(
    optimizer: MegatronOptimizer, correction: Correction | None, stale: Gradients, fresh: Gradients
) -> dict[str, float]:
    """How much the update of stale gradients differs from that of fresh ones; nothing is changed."""
    optimizers = [inner.optimizer for inner in inner_optimizers(optimizer)]

    def update(gradients: Gradients) -> list[torch.Tensor]:
        for param, gradient in gradients.items():
            param.grad = gradient
        updates = statistics.trial_update(optimizers, correction)
        optimizer.zero_grad()
        return updates

    return statistics.staleness(update(stale), update(fresh))
