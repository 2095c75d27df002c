# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""What of a Megatron model chunk an update changes, as things that can be pointed at another weight version."""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_async.mcore.model import biased_routers
from megatron_async.mcore.optimizer import flat_parts
from megatron_async.pipeline.weights import Pointer


class ParameterPointer:
    """A parameter with storage of its own."""

    def __init__(self, param: torch.nn.Parameter) -> None:
        self._param = param

    @property
    def target(self) -> torch.Tensor:
        return self._param.data

    def point(self, target: torch.Tensor) -> None:
        self._param.data = target


class BufferPointer:
    """A module's buffer that an update changes, such as a router's bias."""

    def __init__(self, module: torch.nn.Module, name: str) -> None:
        self._module, self._name = module, name

    @property
    def target(self) -> torch.Tensor:
        return getattr(self._module, self._name)

    def point(self, target: torch.Tensor) -> None:
        setattr(self._module, self._name, target)


class FlatPointer:
    """One of the flat buffers in which Megatron's distributed optimizer keeps a chunk's weights.

    Parameters, buckets and, in fp32, the optimizer's shards are views of it; all of them move together.

    Args:
        buffer: Megatron's parameter and gradient buffer.
        bucket_groups: groups that gather its buckets; they cache views of the buckets.
        shards: the optimizer's tensors that are views of the buffer.
    """

    def __init__(self, buffer: Any, bucket_groups: list[Any], shards: list[torch.Tensor]) -> None:
        self._buffer, self._bucket_groups = buffer, bucket_groups
        start = buffer.param_data.storage_offset()
        self._views = [
            (tensor, tensor.storage_offset() - start, tensor.shape)
            for tensor in [*(param.data for param in buffer.params), *shards]
        ]
        self._tensors = [*buffer.params, *shards]
        self._buckets = [
            (bucket, bucket.param_data.storage_offset() - start, bucket.param_data.numel()) for bucket in buffer.buckets
        ]

    @property
    def target(self) -> torch.Tensor:
        return self._buffer.param_data

    def point(self, target: torch.Tensor) -> None:
        self._buffer.param_data = target
        flat = target.view(-1)
        for tensor, (_, offset, shape) in zip(self._tensors, self._views, strict=True):
            tensor.data = flat[offset : offset + shape.numel()].view(shape)
        for bucket, offset, size in self._buckets:
            bucket.param_data = flat[offset : offset + size]
        for group in self._bucket_groups:
            group.cached_param_buffer_shard_list = [None] * len(group.buckets)


def pointers(chunk: Any, optimizer: MegatronOptimizer) -> Iterator[Pointer]:
    """Everything that an update of a wrapped chunk changes."""
    bucket_groups = (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
    flat: set[torch.nn.Parameter] = set()
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        if buffer.param_data is not None:  # with the distributed optimizer
            storage = buffer.param_data.untyped_storage().data_ptr()
            shards = [part for part, _, _ in flat_parts(optimizer) if part.untyped_storage().data_ptr() == storage]
            groups = [group for group in bucket_groups if any(bucket in buffer.buckets for bucket in group.buckets)]
            flat.update(buffer.params)
            yield FlatPointer(buffer, groups, shards)
    for param in chunk.parameters():
        if param.requires_grad and param not in flat:
            yield ParameterPointer(param)
    for router in biased_routers(chunk):
        yield BufferPointer(router, "expert_bias")
