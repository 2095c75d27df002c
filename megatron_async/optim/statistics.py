# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Sizes of updates, by role, and of what a correction adds to them; in the oracle, how stale updates are.

Everything is summed on the device while the optimizers step, and travels in the background.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_async.optim.corrections import Correction, step_in_pieces
from megatron_async.optim.corrections.pieces import whole
from megatron_async.optim.roles import role_names
from megatron_async.pipeline.host import ReducedValues


class PendingStatistics:
    """Statistics of one batch, on their way over all ranks."""

    def __init__(self, sums: Tensor, work: dist.Work | None) -> None:
        self._values = ReducedValues(sums, work)

    @property
    def ready(self) -> bool:
        return self._values.ready

    def read(self) -> dict[str, Any]:
        """Root mean squares: `update_rms` by role, `correction_rms` over all weights."""
        values = self._values.read()
        roles = len(role_names())
        squares, counts, correction = values[:roles], values[roles : 2 * roles], values[-1]
        rms = {
            role: (square / count) ** 0.5
            for role, square, count in zip(role_names(), squares, counts, strict=True)
            if count
        }
        return {"update_rms": rms, "correction_rms": (correction / max(1.0, sum(counts))) ** 0.5}


class UpdateStatistics:
    """Measures every `interval`-th step of the optimizers.

    An update is the whole change of the master weights, correction included. The correction is what comes after the
    optimizer's own step: k (u_b - u_(b-1)) for error feedback, k v for weight prediction, nothing for corrections of
    the gradient. QK-clip comes later and is in neither. While a measured step runs, two copies of a piece are alive.

    Args:
        optimizers: torch optimizers. Make this before their correction, and call `close` after it, so that the hooks
            come in the right order.
        roles: parameter -> its role.
        group: process group of its own, over all ranks.
        device: where to sum.
    """

    def __init__(
        self,
        optimizers: Iterable[torch.optim.Optimizer],
        roles: Mapping[Tensor, str],
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._optimizers = list(optimizers)
        self._index = {id(param): role_names().index(role) for param, role in roles.items()}
        self._group, self._device = group, device
        self._sums = self._zeros()
        self._before: list[Tensor] = []
        self._plain: list[Tensor] = []
        self.active = False
        """Whether the next step is measured."""
        for optimizer in self._optimizers:
            step_in_pieces(optimizer)
            optimizer.register_step_pre_hook(self._at_start)
            optimizer.register_step_post_hook(self._uncorrected)

    def close(self) -> None:
        """Register the last hook: the correction has been made."""
        for optimizer in self._optimizers:
            optimizer.register_step_post_hook(self._at_end)

    def reduce(self) -> PendingStatistics:
        """Sum over all ranks what was measured since the last call, without waiting. Collective."""
        sums, self._sums = self._sums, self._zeros()
        work = dist.all_reduce(sums, group=self._group, async_op=True) if self._group is not None else None
        return PendingStatistics(sums, work)

    def _zeros(self) -> Tensor:
        return torch.zeros(2 * len(role_names()) + 1, dtype=torch.float32, device=self._device)

    @torch.no_grad()
    def _at_start(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.active:
            self._before = [param.detach().clone() for param in _params(optimizer)]

    @torch.no_grad()
    def _uncorrected(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.active:
            self._plain = [param.detach().clone() for param in _params(optimizer)]

    @torch.no_grad()
    def _at_end(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self.active:
            return
        roles = len(role_names())
        for param, before, plain in zip(_params(optimizer), self._before, self._plain, strict=True):
            index = self._index[id(whole(param))]
            self._sums[index] += before.sub_(param.detach()).square().sum()
            self._sums[roles + index] += param.numel()
            self._sums[-1] += plain.sub_(param.detach()).square().sum()
        self._before, self._plain = [], []


def _params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


@torch.no_grad()
def trial_update(optimizers: Sequence[torch.optim.Optimizer], correction: Correction | None) -> list[Tensor]:
    """The update that the present gradients would give, before any correction; everything is put back.

    Returns:
        Weights before minus weights after for every parameter, in the optimizers' order.
    """
    params = [param for optimizer in optimizers for param in _params(optimizer)]
    weights = [param.detach().clone() for param in params]
    states = [_copy_of_state(optimizer) for optimizer in optimizers]
    for optimizer in optimizers:
        if correction is None:
            type(optimizer).step(optimizer)
        else:
            with correction.paused():
                type(optimizer).step(optimizer)
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


def staleness(stale: Sequence[Tensor], fresh: Sequence[Tensor]) -> dict[str, float]:
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
