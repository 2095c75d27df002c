# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Root mean squares of updates by role, and of the correction in them.

They are summed on the device while the optimizers step, and reduced in the background.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_async.optim.param_groups import ROLES
from megatron_async.optim.step import Piece, StepContext
from megatron_async.platform.host import Reduced


def _roots(sums: list[float]) -> dict[str, Any]:
    """Root mean squares: `update_rms` by role, `correction_rms` over all weights."""
    *values, correction = sums
    squares, counts = values[: len(ROLES)], values[len(ROLES) :]
    by_role = zip(ROLES, squares, counts, strict=True)
    rms = {role: (square / count) ** 0.5 for role, square, count in by_role if count}
    return {"update_rms": rms, "correction_rms": (correction / max(1.0, sum(counts))) ** 0.5}


class UpdateStatistics:
    """Measures the update of every `interval`-th batch; `copy` and `at_end` are parts of an optimizer step.

    An update is the whole change of the master weights, correction included. The correction is the change after the
    optimizer's own step: k (u_b - u_(b-1)) for error feedback, k v for weight prediction, nothing for corrections of
    the gradient. QK-clip comes later and is in neither. Two copies of a piece are alive while it is stepped.

    Args:
        interval: batches between measurements.
        roles: master parameter -> its role.
        group: process group of its own, over all ranks; None for one process.
        device: holds the sums.
    """

    def __init__(
        self, interval: int, roles: Mapping[Tensor, str], group: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        self._interval = interval
        self._index = {id(param): ROLES.index(role) for param, role in roles.items()}
        self._group, self._device = group, device
        self._sums: dict[int, Tensor] = {}
        self._copies: list[list[Tensor]] = []

    def measures(self, batch: int) -> bool:
        """Whether the update of a batch is measured."""
        return (batch + 1) % self._interval == 0

    def copy(self, piece: Piece, context: StepContext) -> None:
        """Part of a step: before anything else, and again after the optimizer's own step."""
        if self.measures(context.batch):
            self._copies.append([param.detach().clone() for param in piece.params])

    def at_end(self, piece: Piece, context: StepContext) -> None:
        """Part of a step, after the correction."""
        if not self.measures(context.batch):
            return
        applies = 1.0 if context.applies is None else context.applies.float()
        sums = self._sums.setdefault(context.batch, self._zeros())
        for param, before, plain in zip(piece.params, *self._copies, strict=True):
            index = self._index[id(param)]
            sums[index] += applies * before.sub_(param.detach()).square().sum()
            sums[len(ROLES) + index] += applies * param.numel()
            sums[-1] += applies * plain.sub_(param.detach()).square().sum()
        self._copies.clear()

    def reduce(self, batch: int) -> Reduced[dict[str, Any]]:
        """Sum over all ranks what was measured of a batch, without waiting. Collective."""
        return Reduced(self._sums.pop(batch, self._zeros()), self._group, _roots)

    def _zeros(self) -> Tensor:
        return torch.zeros(2 * len(ROLES) + 1, dtype=torch.float32, device=self._device)
