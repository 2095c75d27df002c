# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Who steps on what: every parameter has one role, every role one optimizer.

A matrix optimizer (Muon and its relatives, SOAP) steps on the roles that hold linear maps of the hidden layers;
everything else goes to AdamW. Roles follow from Megatron's names, since two axes do not make a linear map: embeddings,
routers and convolutions have them too.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_async.optim.algorithms import catalogue
from megatron_async.optim.sharded import Layout


@dataclass(frozen=True, slots=True)
class Role:
    """A kind of parameter.

    Attributes:
        name: as on the command line.
        summary: what belongs to it.
        matrix: whether a matrix optimizer steps on it unless told otherwise.
        pattern: found in the names of its parameters.
    """

    name: str
    summary: str
    matrix: bool
    pattern: str


# The first role whose pattern is found wins.
ROLES: tuple[Role, ...] = (
    Role("embedding", "token and position embeddings, tied heads too", False, r"embedding"),
    Role("head", "untied output projection to the vocabulary", False, r"output_layer\."),
    Role("convolution", "depthwise convolutions of linear attention", False, r"\.conv1d\."),
    Role("decay", "decay rates and step sizes of linear attention", False, r"\.(A_log|dt_bias|D)$"),
    Role("router", "router and shared expert gate", False, r"\.router\.|\.gate_weight$"),
    Role("norm", "scales and shifts of normalization", False, r"norm"),
    Role("bias", "biases", False, r"bias\d*$"),
    Role("expert", "matrices of routed experts", True, r"\.experts\."),
    Role("qkv", "fused query, key, value (and gate) projection", True, r"\.linear_qkv\.weight$"),
    Role("delta-in", "fused input projection of Gated DeltaNet", True, r"\.in_proj\.weight$"),
    Role("delta-out", "output projection of Gated DeltaNet", True, r"\.out_proj\.weight$"),
    Role("matrix", "every other matrix of a hidden layer", True, r"\.weight\d*$"),
)
_OTHER = Role("other", "parameters of no role above", False, "")

_PREFIX = re.compile(r"^(module\.)+")


def role_names() -> list[str]:
    """Names of all roles."""
    return [role.name for role in (*ROLES, _OTHER)]


def role_of(name: str, param: torch.Tensor) -> Role:
    """The role of a parameter by its Megatron name; wrappers' prefixes do not matter.

    A parameter that sounds like a matrix and has neither two axes nor, as a stack, three is "other".
    """
    if getattr(param, "shared_embedding", False):
        return ROLES[0]
    plain = _PREFIX.sub("", name)
    role = next((role for role in ROLES if re.search(role.pattern, plain)), _OTHER)
    return _OTHER if role.matrix and param.ndim not in (2, 3) else role


class Assignment:
    """Role name -> optimizer name.

    Args:
        optimizer: value of `--optimizer`.
        rest: optimizer of the roles that a matrix optimizer leaves out.
        overrides: role name -> optimizer name, from `--optimizer-for`.
    """

    def __init__(self, optimizer: str, rest: str, overrides: Mapping[str, str]) -> None:
        self.optimizer, self.overrides = optimizer, dict(overrides)
        everywhere = catalogue.find(optimizer).kind == "elementwise"
        self._names = {
            role.name: optimizer if everywhere or role.matrix else rest for role in (*ROLES, _OTHER)
        } | self.overrides

    def __getitem__(self, role: str) -> str:
        return self._names[role]

    def used(self) -> list[str]:
        """Optimizers with at least one role, the chosen one first."""
        return sorted(set(self._names.values()), key=lambda name: (name != self.optimizer, name))

    def roles_of(self, optimizer: str) -> list[str]:
        """Roles of an optimizer."""
        return [role for role, name in self._names.items() if name == optimizer]


def parse_overrides(values: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """ROLE=NAME pairs of the command line -> (overrides, problems)."""
    overrides: dict[str, str] = {}
    problems = []
    matrix_roles = [role.name for role in ROLES if role.matrix]
    for value in values:
        role, _, name = value.partition("=")
        problem = None
        if role not in role_names() or name not in catalogue.names():
            problem = (
                f"must be ROLE=NAME. Roles: {', '.join(role_names())}. Optimizers: {', '.join(catalogue.names())}."
            )
        elif catalogue.find(name).kind == "matrix" and role not in matrix_roles:
            problem = f"{name} steps on matrices only ({', '.join(matrix_roles)}); give {role} to adam, for instance."
        elif role in overrides and overrides[role] != name:
            problem = f"{role} went to {overrides[role]} already; name it once."
        if problem is None:
            overrides[role] = name
        else:
            problems.append(f"--optimizer-for {value}: {problem}")
    return overrides, problems


def qkv_rows(config: Any) -> tuple[int, ...]:
    """Rows of the queries of a key/value group, of their output gates if there are any, of its key, of its value."""
    query = config.num_attention_heads // config.num_query_groups * config.kv_channels
    gate = (query,) if getattr(config, "attention_output_gate", False) else ()
    return (query, *gate, config.kv_channels, config.kv_channels)


def fused_rows(role: Role, module: torch.nn.Module, config: Any) -> tuple[int, ...]:
    """Rows of the matrices that a weight fuses, on this rank, in one repetition; empty where it fuses none.

    - "qkv": Megatron interleaves by key/value group: the queries of a group, its output gates if there are any, its
      key, its value.
    - "delta-in": query, key, value, gate, beta, alpha, once. Each is a linear map from the hidden state and is
      orthogonalized by itself.

    The gate and up projection of a gated MLP stay one matrix, as in Megatron.
    """
    if role.name == "qkv":
        return qkv_rows(config)
    if role.name == "delta-in":
        sections = getattr(module, "in_proj_split_sections", None)
        if sections is None:
            raise ValueError(
                f"in_proj of {type(module).__name__} fuses several matrices in a layout that is not known here: send "
                "it to Adam (--optimizer-for delta-in=adam)."
            )
        return tuple(sections)
    return ()


def named_with_modules(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, torch.nn.Parameter]]:
    """Parameters with their name and the module two levels up: the layer that knows how they are fused."""
    modules = dict(chunk.named_modules())
    for name, param in chunk.named_parameters():
        yield name, modules[name.rpartition(".")[0].rpartition(".")[0]], param


def layouts(
    chunk: torch.nn.Module,
    config: Any,
    shards: Callable[[torch.Tensor], tuple[Any, int] | None],
    roles: Collection[str],
    *,
    split_fused: bool = True,
) -> Iterator[tuple[str, torch.nn.Parameter, Layout]]:
    """The layout of the matrices of a model chunk.

    Args:
        chunk: the model chunk.
        config: its TransformerConfig.
        shards: parameter -> (process group, axis) of its tensor-parallel cut, or None.
        roles: names of the roles whose layouts are wanted.
        split_fused: whether the parts of fused weights are matrices of their own.
    """
    for name, module, param in named_with_modules(chunk):
        role = role_of(name, param)
        if param.ndim < 2 or role.name not in roles:
            continue
        cut = shards(param)
        group, dim = cut if cut is not None else (None, 0)
        yield name, param, Layout(fused_rows(role, module, config) if split_fused else (), group, dim)


@dataclass(frozen=True, slots=True)
class Owned:
    """A parameter and its optimizer, for the table and the check of ownership.

    Attributes:
        name: in the whole model, the same on every layout.
        role, optimizer: who it is, who steps on it.
        elements: of the whole weight, all shards together.
        owners: how many of this rank's optimizers step on it.
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


def check_ownership(ranks: Sequence[Sequence[Owned]], assignment: Assignment) -> list[str]:
    """Problems of the parameters of all ranks: owned by nobody, twice, or an assignment that matched nothing."""
    problems = []
    owners: dict[str, int] = {}
    for rank, parameters in enumerate(ranks):
        for parameter in parameters:
            owners[parameter.name] = owners.get(parameter.name, 0) + parameter.owners
            if parameter.owners > 1:
                problems.append(f"rank {rank}: {parameter.owners} optimizers step on {parameter.name}")
    problems += [f"no optimizer steps on {name}" for name, count in owners.items() if count == 0]
    present = {parameter.role for parameters in ranks for parameter in parameters}
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


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: parameters of one role that are treated alike."""

    role: str
    optimizer: str
    lr: float
    weight_decay: float
    count: int
    elements: int


def table(ranks: Sequence[Sequence[Owned]]) -> list[Row]:
    """The parameters of the whole model by role; copies on several ranks count once."""
    unique: dict[str, Owned] = {}
    for parameters in ranks:
        for parameter in parameters:
            if parameter.owners or parameter.name not in unique:
                unique[parameter.name] = parameter
    order = {name: position for position, name in enumerate(role_names())}
    groups: dict[tuple[int, str, str, float, float], list[int]] = {}
    for parameter in unique.values():
        key = (order[parameter.role], parameter.role, parameter.optimizer, parameter.lr, parameter.weight_decay)
        groups.setdefault(key, []).append(parameter.elements)
    return [Row(*key[1:], count=len(sizes), elements=sum(sizes)) for key, sizes in sorted(groups.items())]
