# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Check that one optimizer steps on each parameter, and print which."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.utils import unwrap_model
from rich.table import Table

from megatron_async.mcore.optimizer import flat_parts, master_of, master_params
from megatron_async.mcore.parallel import tensor_shards
from megatron_async.models.naming import global_names
from megatron_async.optim.param_groups import ROLES, Assignment, role_of


@dataclass(frozen=True, slots=True)
class Owned:
    """A parameter and its optimizer.

    Attributes:
        name: in the whole model, the same on every layout.
        role, optimizer: its parameter group.
        elements: of the whole weight, all shards together.
        owners: how many optimizers of this rank step on it.
        lr: largest learning rate.
        weight_decay: of the optimizer's group.
    """

    name: str
    role: str
    optimizer: str
    elements: int
    owners: int
    lr: float
    weight_decay: float


def owned(chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer, chosen: Assignment) -> list[Owned]:
    """The trainable parameters of this rank's model chunks."""
    groups: dict[int, list[dict[str, Any]]] = {}
    for _, group, param in master_params(optimizer):
        groups.setdefault(id(param), []).append(group)
    for part, param, _ in flat_parts(optimizer):
        groups.setdefault(id(param), []).extend(groups[id(part)])
    parameters = []
    for name, param in _named(chunks):
        if not param.requires_grad:
            continue
        own = groups.get(id(master_of(param)), []) or groups.get(id(param), [])
        role, shards = role_of(name, param), tensor_shards(param)
        elements = param.numel() * (shards[0].size() if shards is not None else 1)
        rates = (float(own[0]["max_lr"]), float(own[0]["weight_decay"])) if own else (0.0, 0.0)
        parameters.append(Owned(name, role, chosen[role], elements, len(own), *rates))
    return parameters


def roles_of_masters(chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer) -> dict[torch.Tensor, str]:
    """Role of every tensor that the optimizers of this rank step on."""
    roles = {id(tensor): role_of(name, param) for name, param in _named(chunks) for tensor in (param, master_of(param))}
    roles |= {id(shard): roles[id(param)] for shard, param, _ in flat_parts(optimizer)}
    return {param: roles[id(param)] for _, _, param in master_params(optimizer)}


def _named(chunks: Sequence[torch.nn.Module]) -> list[tuple[str, torch.nn.Parameter]]:
    return [named for chunk in unwrap_model(list(chunks)) for named in global_names(chunk)]


def check(ranks: Sequence[Sequence[Owned]], assignment: Assignment) -> list[str]:
    """Problems of the parameters of all ranks: no owner, several, or an assignment that matches nothing."""
    problems = []
    owners: dict[str, int] = {}
    for rank, parameters in enumerate(ranks):
        for parameter in parameters:
            owners[parameter.name] = owners.get(parameter.name, 0) + parameter.owners
            if parameter.owners > 1:
                problems.append(f"rank {rank}: {parameter.owners} optimizers step on {parameter.name}")
    problems += [f"no optimizer steps on {name}" for name, count in owners.items() if count == 0]
    present = {parameter.role for parameters in ranks for parameter in parameters}
    if not present:  # --freeze-all-layers
        return problems
    problems += [
        f"--optimizer-for {role}={name}: the model has no parameter of that role. It has: {', '.join(sorted(present))}"
        for role, name in assignment.overrides.items()
        if role not in present
    ]
    if not any(assignment[role] == assignment.optimizer for role in present):
        problems.append(
            f"--optimizer {assignment.optimizer}: the model has no parameter for it. It steps on: "
            f"{', '.join(assignment.roles_of(assignment.optimizer))}; the model has: {', '.join(sorted(present))}"
        )
    return problems


def table(ranks: Sequence[Sequence[Owned]]) -> Table:
    """The parameters of the whole model by role; copies on several ranks count once."""
    unique: dict[str, Owned] = {}
    for parameter in (parameter for parameters in ranks for parameter in parameters):
        if parameter.owners or parameter.name not in unique:
            unique[parameter.name] = parameter
    groups: dict[tuple[int, str, float, float], list[int]] = {}
    for own in unique.values():
        key = (ROLES.index(own.role), own.optimizer, own.lr, own.weight_decay)
        groups.setdefault(key, []).append(own.elements)
    made = Table(title="parameters and their optimizers")
    for column in ("role", "count", "elements", "optimizer", "lr", "weight decay"):
        made.add_column(column, justify="left" if column in ("role", "optimizer") else "right")
    for (role, optimizer, lr, decay), sizes in sorted(groups.items()):
        made.add_row(ROLES[role], f"{len(sizes)}", f"{sum(sizes):,}", optimizer, f"{lr:g}", f"{decay:g}")
    return made
