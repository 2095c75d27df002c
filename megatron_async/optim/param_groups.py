# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Parameter groups: every parameter has one role, every role one optimizer.

A matrix optimizer (Muon and its relatives, SOAP) steps on the roles that hold linear maps of the hidden layers;
everything else goes to AdamW. Roles follow from Megatron's names, since two axes do not make a linear map: embeddings,
routers and convolutions have them too.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from megatron_async.optim import registry
from megatron_async.optim.layout import Layout

MATRIX_ROLES = ("expert", "qkv", "delta-in", "delta-out", "mamba-in", "mamba-out", "matrix")
"""Roles that a matrix optimizer steps on."""
ROLES = ("embedding", "head", "convolution", "decay", "router", "norm", "bias", *MATRIX_ROLES, "other")
"""Values of `--optimizer-for`; docs/optimizers.md describes them."""
KINDS = tuple(
    "embedding attention linear_attention mamba feed_forward router experts shared_expert norm head other".split()
)
"""Parts of a model, for counts of parameters."""

# Pattern in a parameter's name, role, kind. The first match decides.
_PARAMETERS = (
    (r"embedding", "embedding", "embedding"),
    (r"output_layer\.", "head", "head"),
    (r"\.mixer\.conv1d_", "convolution", "mamba"),
    (r"\.mixer\.(A_log|dt_bias|D)$", "decay", "mamba"),
    (r"\.conv1d\.", "convolution", "linear_attention"),
    (r"\.(A_log|dt_bias)$", "decay", "linear_attention"),
    (r"\.router\.", "router", "router"),
    (r"\.gate_weight$", "router", "shared_expert"),
    (r"norm", "norm", "norm"),
    (r"\.shared_experts\..*bias\d*$", "bias", "shared_expert"),
    (r"\.experts\..*bias\d*$", "bias", "experts"),
    (r"\.mlp\..*bias\d*$", "bias", "feed_forward"),
    (r"\.(in|out)_proj\.bias$", "bias", "linear_attention"),
    (r"bias\d*$", "bias", "attention"),
    (r"\.shared_experts\..*\.weight\d*$", "matrix", "shared_expert"),
    (r"\.experts\.", "expert", "experts"),
    (r"\.linear_qkv\.weight$", "qkv", "attention"),
    (r"\.linear_kv_up_proj\.weight$", "qkv", "attention"),
    (r"\.mixer\.in_proj\.weight$", "mamba-in", "mamba"),
    (r"\.mixer\.out_proj\.weight$", "mamba-out", "mamba"),
    (r"\.in_proj\.weight$", "delta-in", "linear_attention"),
    (r"\.out_proj\.weight$", "delta-out", "linear_attention"),
    (r"\.mlp\..*\.weight\d*$", "matrix", "feed_forward"),
    (r"\.self_attention\..*\.weight\d*$", "matrix", "attention"),
    (r"\.weight\d*$", "matrix", "other"),
)
_PREFIX = re.compile(r"^(module\.)+")


def classify(name: str, param: torch.Tensor) -> tuple[str, str]:
    """Role and kind of a parameter by its Megatron name; prefixes of wrappers do not matter.

    A parameter that sounds like a matrix and has neither two axes nor, as a stack, three has the role "other".
    """
    if getattr(param, "shared_embedding", False):
        return "embedding", "embedding"
    plain = _PREFIX.sub("", name)
    for pattern, role, kind in _PARAMETERS:
        if re.search(pattern, plain):
            return ("other" if role in MATRIX_ROLES and param.ndim not in (2, 3) else role), kind
    return "other", "other"


def role_of(name: str, param: torch.Tensor) -> str:
    """Role of a parameter, as `classify`."""
    return classify(name, param)[0]


class Assignment:
    """Role -> name of the optimizer.

    Args:
        optimizer: value of `--optimizer`.
        rest: optimizer of the roles that a matrix optimizer leaves out.
        overrides: role -> name of the optimizer, from `--optimizer-for`.
    """

    def __init__(self, optimizer: str, rest: str, overrides: Mapping[str, str]) -> None:
        self.optimizer, self.overrides = optimizer, dict(overrides)
        own = MATRIX_ROLES if registry.find(optimizer).scope == "matrix" else ROLES
        self._names = {role: optimizer if role in own else rest for role in ROLES} | self.overrides

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
    for value in values:
        role, _, name = value.partition("=")
        problem = None
        if role not in ROLES or name not in registry.names():
            problem = f"must be ROLE=NAME. Roles: {', '.join(ROLES)}. Optimizers: {', '.join(registry.names())}."
        elif registry.find(name).scope == "matrix" and role not in MATRIX_ROLES:
            problem = f"{name} steps on matrices only ({', '.join(MATRIX_ROLES)}); give {role} to adam, for instance."
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


def gate_up_rows(name: str, param: torch.Tensor, config: Any) -> tuple[int, ...]:
    """Rows of the gate and up projection that a weight of a gated MLP fuses on this rank; empty for other weights."""
    if not config.gated_linear_unit or not re.search(r"\.linear_fc1\.weight\d*$", name):
        return ()
    return (param.shape[-2] // 2,) * 2


def fused_rows(role: str, module: torch.nn.Module, config: Any) -> tuple[int, ...]:
    """Rows of the matrices that a weight of attention fuses on this rank, in one repetition; empty where it fuses none.

    - "qkv": Megatron interleaves by key/value group: the queries of a group, its output gates if there are any, its
      key, its value. Multi-latent attention: the keys and values of a head, which share a latent.
    - "delta-in": query, key, value, gate, beta, alpha, once.
    - "mamba-in": z, x, B, C, dt, once.
    """
    if role == "qkv" and getattr(config, "multi_latent_attention", False):
        return config.qk_head_dim, config.v_head_dim
    if role == "qkv":
        return qkv_rows(config)
    if role in ("delta-in", "mamba-in"):
        sections = getattr(module, "in_proj_split_sections", None)
        if sections is None:
            raise ValueError(
                f"in_proj of {type(module).__name__} fuses several matrices in a layout that is not known here: send "
                f"it to Adam (--optimizer-for {role}=adam)."
            )
        return tuple(sections)
    return ()


def layouts(
    chunk: torch.nn.Module,
    config: Any,
    shards: Callable[[torch.Tensor], tuple[Any, int] | None],
    roles: Collection[str],
    *,
    split_fused: bool,
    split_gate_up: bool,
    gather: bool,
) -> Iterator[tuple[str, torch.nn.Parameter, Layout]]:
    """Layout of each parameter of a model chunk that has at least two axes and one of `roles`.

    Args:
        chunk: the model chunk.
        config: its TransformerConfig.
        shards: parameter -> (process group, axis) of its tensor-parallel cut, or None.
        roles: the roles whose layouts are wanted.
        split_fused: whether the parts of fused projections of attention are matrices of their own.
        split_gate_up: the same for the gate and up projection of a gated MLP.
        gather: whether the shards of a weight are one matrix; else each is a matrix of its own.
    """
    modules = dict(chunk.named_modules())
    for name, param in chunk.named_parameters():
        role = role_of(name, param)
        if param.ndim < 2 or role not in roles:
            continue
        layer = modules[name.rpartition(".")[0].rpartition(".")[0]]  # knows how its weights are fused
        rows = fused_rows(role, layer, config) if split_fused else ()
        rows = rows or (gate_up_rows(name, param, config) if split_gate_up else ())
        group, dim = (shards(param) if gather else None) or (None, 0)
        yield name, param, Layout(rows, group, dim)
