# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""What Megatron's optimizers consist of, and their step."""

import argparse
import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, MegatronOptimizer
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
def publish_weights(optimizer: MegatronOptimizer) -> None:
    """Copy the master weights into the model on every data-parallel rank, as the end of an optimizer step does."""
    for inner in inner_optimizers(optimizer):
        if isinstance(inner, DistributedOptimizer | Float16OptimizerWithFloat16Params):
            inner._copy_main_params_to_model_params()
        if isinstance(inner, DistributedOptimizer):
            for chunk in inner.model_chunks:
                chunk.start_param_sync(force_sync=True)
    for member in (optimizer, *members(optimizer)):
        if isinstance(member, LayerWiseDistributedOptimizer):
            member.allgather_params()


def step_unless_not_finite(
    optimizer: MegatronOptimizer, groups: list[list[torch.Tensor]] | None = None
) -> tuple[list[bool], float]:
    """Megatron's optimizer step, left out where the gradient's norm is not finite.

    The parts of `ChainedOptimizer.step` in their order, with one check between them.

    Args:
        optimizer: its gradients are reduced already.
        groups: parameters of the optimizer that are clipped, and skipped, by a norm of their own; one process only.

    Returns:
        Whether each group (or, without groups, everything) was skipped, and the global norm before clipping.
    """
    if optimizer.prepare_grads():  # fp16: the loss scaler found an overflow
        return [True] * len(groups or [[]]), math.nan
    if groups is None:
        norm = float(optimizer.get_grad_norm())
        if not math.isfinite(norm):
            return [True], math.nan
        for inner in inner_optimizers(optimizer):
            if inner.config.clip_grad > 0 and (params := inner.get_parameters()):
                clip_grad_by_total_norm_fp32(params, inner.config.clip_grad, norm)
        optimizer.step_with_ready_grads()
        return [False], norm
    norms = [_clip_or_forget(group, optimizer.config.clip_grad) for group in groups]
    optimizer.step_with_ready_grads()
    skipped = [not math.isfinite(norm) for norm in norms]
    return skipped, math.nan if any(skipped) else math.hypot(*norms)


def _clip_or_forget(params: list[torch.Tensor], clip_grad: float) -> float:
    """Clip one group by its own norm; forget its gradients, so that no optimizer touches it, if that is not finite."""
    norm = math.sqrt(sum(float(param.grad.double().square().sum()) for param in params if param.grad is not None))
    if not math.isfinite(norm):
        for param in params:
            param.grad = None
    elif clip_grad > 0 and params:
        clip_grad_by_total_norm_fp32(params, clip_grad, norm)
    return norm


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
