# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Largest attention logits of each batch, while several batches are in flight."""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from megatron_async.mcore.model import softmax_attentions, watch_logits
from megatron_async.mcore.parallel import device


class LogitMaxima:
    """The largest logit of each head of some model chunks over each batch.

    Args:
        chunks: model chunks; those to whose softmax attentions it listens.
        group: data-parallel (and context-parallel) ranks, which see different parts of a batch. Tensor-parallel ranks
            have heads of their own.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], group: dist.ProcessGroup) -> None:
        attentions = softmax_attentions(chunks)
        self._group, self._device = group, device()
        self._shape = (len(attentions), attentions[0].num_attention_heads_per_partition if attentions else 0)
        self._open: dict[int, torch.Tensor] = {}
        self._reduced: dict[int, torch.Tensor] = {}
        self.use(0)
        for layer, attention in enumerate(attentions):
            watch_logits(attention, partial(self._record, layer))

    def use(self, batch: int) -> None:
        """Forwards, recomputed ones too, are those of `batch` from now on."""
        if batch not in self._open:
            self._open[batch] = torch.full(self._shape, -torch.inf, dtype=torch.float32, device=self._device)
        self._current = self._open[batch]

    def reduce(self, batch: int) -> dist.Work | None:
        """All forwards of `batch` are done on this rank: start to take the maxima over the group."""
        maxima = self._reduced[batch] = self._open.pop(batch)
        if self._group.size() == 1 or maxima.numel() == 0:
            return None
        return dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def take(self, batch: int) -> torch.Tensor:
        """The maxima of `batch`, whose reduction is done: [softmax attentions, heads of this rank], fp32.

        Minus infinity where no forward has run.
        """
        return self._reduced.pop(batch)

    def forget(self, batch: int) -> None:
        """The forwards of `batch` so far do not count."""
        self._open.pop(batch, None)
        self.use(batch)

    @torch.no_grad()
    def _record(self, layer: int, maxima: torch.Tensor) -> None:
        torch.maximum(self._current[layer], maxima.float(), out=self._current[layer])
