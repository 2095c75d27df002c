# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Two generations of a stage's gradient buffers.

The backward of batch b+1 starts while batch b's gradients are still being reduced and applied, so batches take
turns: batch b accumulates into generation b % 2. Megatron's data-parallel wrapper accumulates into
`param.main_grad`, a view of a flat buffer; changing the generation means giving every parameter another view.
"""

from collections.abc import Iterator
from typing import Any

import torch

GENERATIONS = 2


class GradientGenerations:
    """Flat gradient buffers of one data-parallel wrapped chunk, twice.

    Args:
        chunk: Megatron's DistributedDataParallel around a model chunk, built without overlapped reduction.
    """

    def __init__(self, chunk: Any) -> None:
        self._buffers = list(chunk.buffers) + list(chunk.expert_parallel_buffers)
        self._params = [param for buffer in self._buffers for param in buffer.params]
        first = [buffer.grad_data for buffer in self._buffers]
        self._flat = [first] + [[torch.zeros_like(data) for data in first] for _ in range(GENERATIONS - 1)]
        self._views = [
            [view for buffer, flat in zip(self._buffers, flats, strict=True) for view in self._views_of(buffer, flat)]
            for flats in self._flat
        ]
        self._used = 0

    @staticmethod
    def _views_of(buffer: Any, flat: torch.Tensor) -> list[torch.Tensor]:
        views = []
        for param in buffer.params:
            offset = param.main_grad.storage_offset() - buffer.grad_data.storage_offset()
            views.append(flat.view(-1)[offset : offset + param.main_grad.numel()].view(param.main_grad.shape))
        return views

    def use(self, batch: int) -> None:
        """Accumulate into, and read from, the generation of `batch`."""
        generation = batch % GENERATIONS
        if generation == self._used:
            return
        for param, view in zip(self._params, self._views[generation], strict=True):
            param.main_grad = view
        self._used = generation

    @property
    def used(self) -> int:
        """The generation in use; pass it to `use` to come back to it."""
        return self._used

    def flat(self, batch: int) -> Iterator[tuple[Any, torch.Tensor]]:
        """Megatron's buffer descriptions with the flat gradients of `batch`."""
        yield from zip(self._buffers, self._flat[batch % GENERATIONS], strict=True)

    def clear(self, batch: int) -> None:
        """Set the gradients of `batch` to zero, ready for batch + 2."""
        torch._foreach_zero_(self._flat[batch % GENERATIONS])
