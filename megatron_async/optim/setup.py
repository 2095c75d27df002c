# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""From the command line to a Megatron optimizer: described before the model is built, checked and printed after."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.utils import get_model_config
from rich.console import Console

from megatron_async.mcore.build import Optimizers
from megatron_async.mcore.optimizer import master_of, master_params
from megatron_async.mcore.parallel import tensor_shards
from megatron_async.optim import options, ownership, registry
from megatron_async.optim.layout import LAYOUT, Layout
from megatron_async.optim.param_groups import Assignment, layouts, role_of
from megatron_async.platform.groups import GroupKey, make_groups


def optimizers(args: argparse.Namespace) -> Optimizers:
    """The optimizers that `args` names, for `setup_model_and_optimizer`."""
    chosen = options.assignment(args)

    def build(name: str, groups: list[dict[str, Any]], chunks: list[Any]) -> torch.optim.Optimizer:
        _set_layouts(args, chunks, chosen)
        return registry.find(name).build(groups, **options.hyperparameters(args, name))

    return Optimizers(chosen.used(), build, lambda name, param: chosen[role_of(name, param)])


def _set_layouts(args: argparse.Namespace, chunks: Sequence[torch.nn.Module], chosen: Assignment) -> None:
    for optimizer in chosen.used():
        scope, roles = registry.find(optimizer).scope, chosen.roles_of(optimizer)
        for chunk in chunks if scope != "element" else ():
            found = layouts(chunk, get_model_config(chunk), tensor_shards, roles, **options.splits(args, scope))
            for name, param, layout in found:
                layout.check(name, tuple(param.shape))
                setattr(param, LAYOUT, layout)


def finish(args: argparse.Namespace, chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer) -> None:
    """After `setup_model_and_optimizer`: check the parameter groups of every stage, and print them on rank 0.
    Collective.

    Raises:
        ValueError: on every rank alike; a parameter without an owner or with two, or an option that matches nothing.
    """
    chosen = options.assignment(args)
    _separate_shards(chunks)
    _give_layouts_to_masters(chunks, optimizer, chosen)
    ranks: list[list[ownership.Owned]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(ranks, ownership.owned(chunks, optimizer, chosen))
    problems = ownership.check(ranks, chosen)
    if problems:
        raise ValueError("\n".join(problems))
    if args.rank == 0:
        console = Console(width=100)
        console.print(ownership.table(ranks))
        matrix = any(registry.find(name).scope == "matrix" for name in chosen.used())
        if matrix and args.muon_tp_mode == "blockwise" and args.tensor_model_parallel_size > 1:
            console.print(
                "> --muon-tp-mode blockwise: each tensor-parallel shard is orthogonalized by itself, so updates depend "
                f"on the tensor-parallel size ({args.tensor_model_parallel_size})."
            )


def _separate_shards(chunks: Sequence[torch.nn.Module]) -> None:
    """Give steps process groups of their own: they run beside the compute, which uses Megatron's. Collective."""
    cut = [
        (param, layout, layout.shards)
        for chunk in chunks
        for param in chunk.parameters()
        if isinstance(layout := getattr(param, LAYOUT, None), Layout) and layout.shards is not None
    ]
    groups = list(dict.fromkeys(shards for _, _, shards in cut))
    keys = [GroupKey(f"steps over {ranks}", tuple(ranks)) for ranks in map(dist.get_process_group_ranks, groups)]
    own = dict(zip(groups, make_groups(keys), strict=True))
    for param, layout, shards in cut:
        setattr(param, LAYOUT, replace(layout, shards=own[shards]))


def _give_layouts_to_masters(
    chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer, chosen: Assignment
) -> None:
    """Megatron's fp32 copies of parameters leave attributes behind that they do not know."""
    for chunk in chunks:
        for param in chunk.parameters():
            layout = getattr(param, LAYOUT, None)
            if isinstance(layout, Layout):
                setattr(master_of(param), LAYOUT, layout)
    matrix = {registry.find(name).optimizer for name in chosen.used() if registry.find(name).scope == "matrix"}
    for inner, _, stepped in master_params(optimizer):
        assert type(inner) not in matrix or hasattr(stepped, LAYOUT), "a matrix without a layout"
