# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""From the command line to a Megatron optimizer: registration before the model is built, checks and the table after."""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.utils import get_model_config, unwrap_model
from rich.console import Console
from rich.table import Table

from megatron_async.mcore.build import Optimizers
from megatron_async.mcore.optimizer import flat_sharded, master_of, master_params, shards_of
from megatron_async.mcore.parallel import tensor_shards
from megatron_async.models.naming import global_names
from megatron_async.optim import roles, settings
from megatron_async.optim.algorithms import catalogue
from megatron_async.optim.sharded import LAYOUT, SHARDED, Layout, ShardedMuon, check_layout


def optimizers(args: argparse.Namespace) -> Optimizers:
    """The optimizers that `args` names, for `setup_model_and_optimizer`."""
    chosen = settings.assignment(args)

    def build(name: str, groups: list[dict[str, Any]], chunks: list[Any]) -> torch.optim.Optimizer:
        _set_layouts(args, chunks, chosen)
        return _build(args, name, groups)

    return Optimizers(chosen.used(), build, lambda name, param: chosen[roles.role_of(name, param).name])


def _build(args: argparse.Namespace, name: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    info = catalogue.find(name)
    optimizer = SHARDED.get(name, info.optimizer)(groups, **settings.hyperparameters(args, name))
    if info.kind == "matrix" and name in SHARDED:
        optimizer.tp_mode = args.muon_tp_mode  # type: ignore[attr-defined]
    if isinstance(optimizer, ShardedMuon):
        optimizer.extra_scale_factor = args.muon_extra_scale_factor
    return optimizer


def _set_layouts(args: argparse.Namespace, chunks: Sequence[torch.nn.Module], chosen: roles.Assignment) -> None:
    fused = [role for name in chosen.used() if catalogue.find(name).kind == "matrix" for role in chosen.roles_of(name)]
    whole = [role for role in chosen.roles_of("mars") if role not in fused]
    for chunk in chunks:
        config = get_model_config(chunk)
        for wanted, split in ((fused, args.muon_split_qkv), (whole, False)):
            for name, param, layout in roles.layouts(chunk, config, tensor_shards, wanted, split_fused=split):
                check_layout(name, tuple(param.shape), layout)
                setattr(param, LAYOUT, layout)


def finish(args: argparse.Namespace, chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer) -> None:
    """After `setup_model_and_optimizer`: check who owns what on every stage, and print it on rank 0. Collective.

    Raises:
        ValueError: on every rank alike; a parameter without an owner or with two, or an option that matches nothing.
    """
    _give_layouts_to_masters(chunks)
    chosen = settings.assignment(args)
    own = _owned(chunks, optimizer, chosen)
    ranks: list[list[roles.Owned]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(ranks, own)
    problems = roles.check_ownership(ranks, chosen)
    if problems:
        raise ValueError("\n".join(problems))
    if args.rank == 0:
        _print_table(args, roles.table(ranks), chosen)


def roles_of_masters(chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer) -> dict[torch.Tensor, str]:
    """What this rank's optimizers step on -> its role."""
    names = {
        id(tensor): roles.role_of(name, param).name
        for chunk in unwrap_model(list(chunks))
        for name, param in global_names(chunk)
        for tensor in (param, master_of(param))
    }
    names |= {id(shard): names[id(param)] for shard, param in shards_of(optimizer)}
    return {param: names[id(param)] for _, _, param in master_params(optimizer)}


def _give_layouts_to_masters(chunks: Sequence[torch.nn.Module]) -> None:
    """Megatron's fp32 copies of parameters leave attributes behind that they do not know."""
    for chunk in chunks:
        for param in chunk.parameters():
            layout = getattr(param, LAYOUT, None)
            if isinstance(layout, Layout):
                setattr(master_of(param), LAYOUT, layout)


def _owned(
    chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer, chosen: roles.Assignment
) -> list[roles.Owned]:
    groups: dict[int, list[dict[str, Any]]] = {}
    for _, group, param in master_params(optimizer):
        groups.setdefault(id(param), []).append(group)
    for group, param in flat_sharded(optimizer):
        groups.setdefault(id(param), []).append(group)
    parameters = []
    for chunk in unwrap_model(list(chunks)):
        for name, param in global_names(chunk):
            if not param.requires_grad:
                continue
            role = roles.role_of(name, param).name
            own = groups.get(id(master_of(param)), []) or groups.get(id(param), [])
            shards = tensor_shards(param)
            parameters.append(
                roles.Owned(
                    name=name,
                    role=role,
                    optimizer=chosen[role],
                    elements=param.numel() * (shards[0].size() if shards is not None else 1),
                    owners=len(own),
                    lr=float(own[0]["max_lr"]) if own else 0.0,
                    weight_decay=float(own[0]["weight_decay"]) if own else 0.0,
                )
            )
    return parameters


def _print_table(args: argparse.Namespace, rows: Sequence[roles.Row], chosen: roles.Assignment) -> None:
    table = Table(title="parameters and their optimizers")
    for column in ("role", "count", "elements", "optimizer", "lr", "weight decay"):
        table.add_column(column, justify="left" if column in ("role", "optimizer") else "right")
    for row in rows:
        table.add_row(
            row.role, str(row.count), f"{row.elements:,}", row.optimizer, f"{row.lr:g}", f"{row.weight_decay:g}"
        )
    console = Console(width=100)
    console.print(table)
    matrix = any(catalogue.find(name).kind == "matrix" for name in chosen.used())
    if matrix and args.muon_tp_mode == "blockwise" and args.tensor_model_parallel_size > 1:
        console.print(
            "> --muon-tp-mode blockwise: each tensor-parallel shard is orthogonalized by itself, so updates depend "
            f"on the tensor-parallel size ({args.tensor_model_parallel_size})."
        )
