# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Totals over all parameters: the norm of the weights, zeros in the gradient. Summed on the device, then over ranks."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from megatron_async.mcore.optimizer import norm_groups
from megatron_async.optim.step import Piece, StepContext


def shares(optimizer: MegatronOptimizer) -> dict[Tensor, float]:
    """Master parameters that this rank counts, with their share: 1 / replicas, so that each element counts once."""
    world = dist.get_world_size()
    return {
        param: (world if group is None else dist.get_world_size(group)) / world
        for inner, group in norm_groups(optimizer)
        for param in inner.get_parameters()
        if param_is_not_shared(param)
        and param_is_not_tensor_parallel_duplicate(
            param, getattr(inner, "tp_group", None), getattr(inner, "expert_tp_group", None)
        )
    }


def sum_of_squares(counted: Mapping[Tensor, float], device: torch.device) -> Tensor:
    """This rank's part of the squared L2 norm of the master weights, shape (1,), float64."""
    total = torch.zeros(1, dtype=torch.float64, device=device)
    for param, share in counted.items():
        total += share * param.detach().float().square().sum()
    return total


class GradientZeros:
    """Counts zeros in the gradients that optimizers step with; a part of an optimizer step."""

    def __init__(self, counted: Mapping[Tensor, float], device: torch.device) -> None:
        self._shares = {id(param): share for param, share in counted.items()}
        self._device = device
        self._sums: dict[int, Tensor] = {}

    def __call__(self, piece: Piece, context: StepContext) -> None:
        """Part of a step, before the optimizer's own."""
        total = self._sums.setdefault(context.batch, self._none())
        for param in piece.params:
            if param.grad is not None and id(param) in self._shares:
                total += self._shares[id(param)] * (param.grad.numel() - torch.count_nonzero(param.grad))

    def take(self, batch: int) -> Tensor:
        """This rank's part of the zeros of a batch, shape (1,), float64; 0 for a skipped update."""
        return self._sums.pop(batch, self._none())

    def _none(self) -> Tensor:
        return torch.zeros(1, dtype=torch.float64, device=self._device)
