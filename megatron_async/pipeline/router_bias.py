# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Loss-free load balancing (arXiv 2408.15664) with batches in flight.

A router counts the tokens of each expert over a batch; the update of that batch moves its bias by a fixed amount.
The bias belongs to a weight version, the counts to a batch.
"""

import torch
import torch.distributed as dist

from megatron_async.mcore.model import biased_routers
from megatron_async.pipeline.gradients import GENERATIONS


class RouterBiases:
    """The biased routers of one chunk.

    Args:
        chunk: the model chunk.
        group: tensor- and data-parallel ranks, which see different tokens of a batch.
        rate: by how much a bias moves; Megatron's --moe-router-bias-update-rate.
    """

    def __init__(self, chunk: torch.nn.Module, group: dist.ProcessGroup, rate: float) -> None:
        self._routers = biased_routers(chunk)
        self._group, self._rate = group, rate
        self._counts = [
            [torch.zeros_like(router.local_tokens_per_expert) for router in self._routers] for _ in range(GENERATIONS)
        ]
        self._sums: dict[int, torch.Tensor] = {}
        self.use(0)

    def use(self, batch: int) -> None:
        """Count for `batch` from now on."""
        for router, counts in zip(self._routers, self._counts[batch % GENERATIONS], strict=True):
            router.local_tokens_per_expert = counts

    def reduce(self, batch: int) -> dist.Work | None:
        """Start to add up the counts of `batch`."""
        if not self._routers:
            return None
        self._sums[batch] = torch.stack(self._counts[batch % GENERATIONS])
        torch._foreach_zero_(self._counts[batch % GENERATIONS])
        return dist.all_reduce(self._sums[batch], group=self._group, async_op=True)

    @torch.no_grad()
    def apply(self, batch: int, applies: torch.Tensor | None = None) -> None:
        """Move the biases of the weight version in use: up where an expert got less than the mean, down where more.

        Args:
            batch: number of the batch.
            applies: 0-dim bool tensor: whether to move them, where only the device knows it.
        """
        if not self._routers:
            return
        counts = self._sums.pop(batch)
        step = torch.sign(counts.mean(dim=-1, keepdim=True) - counts) * self._rate
        if applies is not None:
            step = step * applies
        for router, change in zip(self._routers, step, strict=True):
            router.expert_bias.add_(change)

    def forget(self, batch: int) -> None:
        """The update of `batch` is skipped."""
        self._sums.pop(batch, None)
