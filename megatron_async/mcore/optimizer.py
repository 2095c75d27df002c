# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Members, parameters and gradient norms of Megatron's optimizers."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer


def inner_optimizers(optimizer: MegatronOptimizer | None) -> Iterator[MegatronOptimizer]:
    """The Megatron optimizers that own a torch optimizer each, in Megatron's order, without stubs."""
    for member in members(optimizer):
        yield from inner_optimizers(member)
    if not members(optimizer) and optimizer is not None and not optimizer.is_stub_optimizer:
        yield optimizer


def members(optimizer: MegatronOptimizer | None) -> Sequence[MegatronOptimizer]:
    """The members of a chained optimizer; empty for any other."""
    return optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else ()


def master_params(
    optimizer: MegatronOptimizer | None,
) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any], torch.Tensor]]:
    """(torch optimizer, parameter group, parameter) of everything this rank updates; in bf16 training, fp32 masters."""
    for inner in inner_optimizers(optimizer):
        for group in inner.optimizer.param_groups:
            for param in group["params"]:
                yield inner.optimizer, group, param


def flat_parts(optimizer: MegatronOptimizer) -> Iterator[tuple[torch.Tensor, torch.nn.Parameter, int]]:
    """What distributed optimizers shard as flat buffers: this rank's part, the model's parameter, and the position of
    the part's first element in the flattened parameter."""
    for inner in inner_optimizers(optimizer):
        if isinstance(inner, DistributedOptimizer):
            for param, (group, position) in inner.model_param_group_index_map.items():
                part = inner.optimizer.param_groups[group]["params"][position]
                yield part, param, inner._get_model_param_range_map(param)["param"].start


@torch.no_grad()
def publish_weights(optimizer: MegatronOptimizer, *, gather_now: bool = False) -> None:
    """Copy the master weights into the model on every data-parallel rank: the second half of Megatron's step.

    As `step_with_ready_grads` of its optimizers, but chunks that two optimizers share are gathered once.

    Args:
        gather_now: gather even where `--overlap-param-gather` leaves it to the next forward.
    """
    chunks: dict[int, Any] = {}
    for inner in inner_optimizers(optimizer):
        _copy_masters(inner)
        if isinstance(inner, DistributedOptimizer) and (gather_now or not inner.ddp_config.overlap_param_gather):
            chunks |= {id(chunk): chunk for chunk in inner.model_chunks}
    for chunk in chunks.values():
        chunk.start_param_sync(force_sync=gather_now)
    for member in (optimizer, *members(optimizer)):
        if isinstance(member, LayerWiseDistributedOptimizer) and (gather_now or not member.overlap_param_gather):
            if member.use_buffer_param_sync:
                member.start_param_sync_for_bucket_group_subset()
            else:
                member.allgather_params()


def gathering_buckets(chunk: Any) -> list[Any]:
    """The bucket groups of a wrapped chunk whose weights `publish_weights` gathers, each over a group of its own:
    `intra_distributed_optimizer_instance_group`."""
    groups = (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
    return [group for group in groups if group.ddp_config.use_distributed_optimizer]


def gathers_whole_parameters(optimizer: MegatronOptimizer) -> bool:
    """Whether the layer-wise optimizer gathers weights, over Megatron's data-parallel groups."""
    return any(isinstance(member, LayerWiseDistributedOptimizer) for member in (optimizer, *members(optimizer)))


def _copy_masters(inner: MegatronOptimizer) -> None:
    if inner.config.reuse_grad_buf_for_mxfp8_param_ag and hasattr(inner, "_copy_main_params_to_param_buffer"):
        if not inner.config.overlap_param_gather:
            inner._copy_main_params_to_param_buffer()
    elif hasattr(inner, "_copy_main_params_to_model_params"):
        inner._copy_main_params_to_model_params()


def master_of(param: torch.nn.Parameter) -> torch.Tensor:
    """The tensor that the optimizer updates for a model parameter: its fp32 master in bf16 training, else itself."""
    master = getattr(param, "main_param", None)
    return param if master is None else master


def mark_delay(param: torch.nn.Parameter, delay: int) -> None:
    """Set the gradient delay, in updates, of a parameter and its master. Corrections skip those with delay 0."""
    for tensor in (param, master_of(param)):
        tensor.gradient_delay = delay  # type: ignore[attr-defined]


def norm_groups(optimizer: MegatronOptimizer) -> Iterator[tuple[MegatronOptimizer, dist.ProcessGroup | None]]:
    """`inner_optimizers`, each with the group over which the squares of its gradient are summed.

    None is the group of all ranks: the layer-wise optimizer assigns whole parameters to data-parallel ranks, so their
    squares are summed over these too, whatever its members say.
    """
    if isinstance(optimizer, LayerWiseDistributedOptimizer):
        yield from ((inner, None) for inner in inner_optimizers(optimizer))
    elif isinstance(optimizer, ChainedOptimizer):
        for member in optimizer.chained_optimizers:
            yield from norm_groups(member)
    elif not optimizer.is_stub_optimizer:
        yield optimizer, optimizer.get_grad_stats_parallel_group()


def scheduler_for(scheduler: Any, optimizer: MegatronOptimizer) -> Any:
    """A copy of Megatron's learning-rate scheduler, with its progress, for another optimizer."""
    copied = copy.copy(scheduler)
    copied.optimizer = optimizer
    return copied
