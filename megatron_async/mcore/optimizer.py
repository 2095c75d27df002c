# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""What Megatron's optimizers consist of, and their step."""

import argparse
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig


def inner_optimizers(optimizer: MegatronOptimizer) -> Iterator[MegatronOptimizer]:
    """The Megatron optimizers that own a torch optimizer each, in Megatron's order; stubs are left out."""
    for member in members(optimizer):
        yield from inner_optimizers(member)
    if not members(optimizer) and not optimizer.is_stub_optimizer:
        yield optimizer


def members(optimizer: MegatronOptimizer) -> Sequence[MegatronOptimizer]:
    """What a chain of optimizers consists of; nothing for one that is no chain."""
    return optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else ()


def master_params(optimizer: MegatronOptimizer) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any], torch.Tensor]]:
    """Every (torch optimizer, parameter group, parameter) that this rank steps on; with bf16, fp32 master copies."""
    for inner in inner_optimizers(optimizer):
        for group in inner.optimizer.param_groups:
            for param in group["params"]:
                yield inner.optimizer, group, param


def is_layer_wise(optimizer: MegatronOptimizer) -> bool:
    """Whether each parameter is stepped on by one data-parallel rank, which sends it to the others."""
    return isinstance(optimizer, LayerWiseDistributedOptimizer) or any(map(is_layer_wise, members(optimizer)))


def flat_sharded(optimizer: MegatronOptimizer) -> Iterator[tuple[dict[str, Any], torch.nn.Parameter]]:
    """(parameter group, model parameter) of what a distributed optimizer keeps in flat pieces over all ranks."""
    for inner in inner_optimizers(optimizer):
        if isinstance(inner, DistributedOptimizer):
            for param, (group, _) in inner.model_param_group_index_map.items():
                yield inner.optimizer.param_groups[group], param


def shards_of(optimizer: MegatronOptimizer) -> Iterator[tuple[torch.Tensor, torch.nn.Parameter]]:
    """(what a distributed optimizer steps on, the model parameter that it is a part of)."""
    for inner in inner_optimizers(optimizer):
        if isinstance(inner, DistributedOptimizer):
            for param, (group, position) in inner.model_param_group_index_map.items():
                yield inner.optimizer.param_groups[group]["params"][position], param


def flat_parts(optimizer: MegatronOptimizer) -> Iterator[tuple[torch.Tensor, torch.nn.Parameter, int]]:
    """`shards_of`, each with the position of its first element in the flattened parameter."""
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


def _copy_masters(inner: MegatronOptimizer) -> None:
    if inner.config.reuse_grad_buf_for_mxfp8_param_ag and hasattr(inner, "_copy_main_params_to_param_buffer"):
        if not inner.config.overlap_param_gather:
            inner._copy_main_params_to_param_buffer()
    elif hasattr(inner, "_copy_main_params_to_model_params"):
        inner._copy_main_params_to_model_params()


def master_of(param: torch.nn.Parameter) -> torch.Tensor:
    """What the optimizer steps for a model parameter: its fp32 master copy in bf16 training, else itself."""
    master = getattr(param, "main_param", None)
    return param if master is None else master


def mark_delay(param: torch.nn.Parameter, delay: int) -> None:
    """Note on a parameter and its master how many updates old its gradients are; corrections leave 0 alone."""
    for tensor in (param, master_of(param)):
        tensor.gradient_delay = delay  # type: ignore[attr-defined]


def norm_groups(optimizer: MegatronOptimizer) -> Iterator[tuple[MegatronOptimizer, dist.ProcessGroup | None]]:
    """Optimizers that own a torch optimizer, each with the group whose ranks hold the other parts of its gradient.

    None is the whole job. The layer-wise optimizer deals whole parameters out to data-parallel ranks and therefore
    sums over all of them, whatever its members say.
    """
    if isinstance(optimizer, LayerWiseDistributedOptimizer):
        yield from ((inner, None) for inner in inner_optimizers(optimizer))
    elif isinstance(optimizer, ChainedOptimizer):
        for member in optimizer.chained_optimizers:
            yield from norm_groups(member)
    elif not optimizer.is_stub_optimizer:
        yield optimizer, optimizer.get_grad_stats_parallel_group()


def fp32_shards(optimizer: MegatronOptimizer) -> Iterator[torch.Tensor]:
    """What the distributed optimizer steps in fp32 training: this rank's parts of the weights, as views of them."""
    for inner in inner_optimizers(optimizer):
        if isinstance(inner, DistributedOptimizer):
            yield from (shard for shards in inner.shard_fp32_groups for shard in shards)


def scheduler_for(scheduler: Any, optimizer: MegatronOptimizer) -> Any:
    """Megatron's learning-rate scheduler with the same settings and progress, for another optimizer."""
    copied = copy.copy(scheduler)
    copied.optimizer = optimizer
    return copied


def optimizer_for(chunks: list[Any], args: argparse.Namespace) -> MegatronOptimizer:
    """Megatron's optimizer of wrapped chunks, for SGD and Adam."""
    config = OptimizerConfig(
        optimizer=args.optimizer,
        lr=args.lr,
        weight_decay=args.weight_decay,
        sgd_momentum=args.sgd_momentum,
        clip_grad=args.clip_grad,
    )
    return get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
