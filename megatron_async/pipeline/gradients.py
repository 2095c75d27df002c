# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Two generations of what a delayed chunk accumulates over a batch: gradient buffers, and routers' token counts.

The backward of batch b+1 starts while batch b's gradients are still being reduced and applied, so batches take
turns: batch b accumulates into generation b % 2. A chunk without delay updates before its next forward, so its
gradients need one generation. Megatron's data-parallel wrapper accumulates into `param.main_grad`, a view of a flat
buffer; changing the generation means giving every parameter another view.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

GENERATIONS = 2


@dataclass(frozen=True, slots=True)
class FlatGradients:
    """One of Megatron's gradient buffers with the storage of one generation.

    Attributes:
        buffer: Megatron's description: parameters, data-parallel group, scaling factor.
        data: the flat gradients.
        buckets: its parts that are reduced on their own, in order.
    """

    buffer: Any
    data: torch.Tensor
    buckets: tuple[torch.Tensor, ...]


class GradientGenerations:
    """Flat gradient buffers of one data-parallel wrapped chunk, once or twice.

    Args:
        chunk: Megatron's DistributedDataParallel around a model chunk, built without overlapped reduction.
        generations: how often.
    """

    def __init__(self, chunk: Any, generations: int = GENERATIONS) -> None:
        buffers = list(chunk.buffers) + list(chunk.expert_parallel_buffers)
        self._params = [param for buffer in buffers for param in buffer.params]
        self._generations = [
            [
                _with_storage(buffer, buffer.grad_data if first else torch.zeros_like(buffer.grad_data))
                for buffer in buffers
            ]
            for first in (True, *[False] * (generations - 1))
        ]
        self._views = [[view for flat in flats for view in _views(flat)] for flats in self._generations]
        self._used = 0

    def use(self, batch: int) -> None:
        """Accumulate into the generation of `batch` from now on."""
        self._switch(batch % len(self._generations))

    @contextmanager
    def reading(self, batch: int) -> Iterator[None]:
        """Let parameters show the gradients of `batch` for a moment."""
        accumulating = self._used
        self._switch(batch % len(self._generations))
        try:
            yield
        finally:
            self._switch(accumulating)

    def flat(self, batch: int) -> list[FlatGradients]:
        """The buffers that hold the gradients of `batch`."""
        return self._generations[batch % len(self._generations)]

    def clear(self, batch: int) -> None:
        """Set the gradients of `batch` to zero, ready for batch + 2."""
        for flat in self.flat(batch):
            flat.data.zero_()

    def _switch(self, generation: int) -> None:
        if generation == self._used:
            return
        for param, view in zip(self._params, self._views[generation], strict=True):
            param.main_grad = view
        self._used = generation


def _with_storage(buffer: Any, data: torch.Tensor) -> FlatGradients:
    start, flat = buffer.grad_data.storage_offset(), data.view(-1)
    offsets = [(bucket.grad_data.storage_offset() - start, bucket.grad_data.numel()) for bucket in buffer.buckets]
    return FlatGradients(buffer, data, tuple(flat[offset : offset + size] for offset, size in offsets))


def _views(flat: FlatGradients) -> Iterator[torch.Tensor]:
    """For each parameter its part of the gradients, at the place of its present main_grad."""
    start = flat.buffer.grad_data.storage_offset()
    for param in flat.buffer.params:
        offset, grad = param.main_grad.storage_offset() - start, param.main_grad
        yield flat.data.view(-1)[offset : offset + grad.numel()].view(grad.shape)
