# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Optimizer state in a checkpoint: the same tensors for every parameter, settings for any tree of optimizers.

Tensors are saved under the names of their parameters, whichever optimizer owns them. Step counts and settings of
parameter groups are saved as a tree of optimizers, which depends on layout and schedule: WPipe has one optimizer for
each chunk, and experts have their own where they are spread over ranks.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer, param_group_identifier_keys

from megatron_async.mcore.optimizer import inner_optimizers, master_params, members
from megatron_async.optim.corrections import PREVIOUS_UPDATE

_EXPERTS = "is_expert_parallel"
# Settings by which Megatron tells groups apart, but which a resumed run may change.
_RATES = ("max_lr", "min_lr", "start_wd", "end_wd")
# What a group takes from the checkpoint; every other setting is this run's.
_PROGRESS = ("params", "step", "lr", "weight_decay")


def complete(optimizer: MegatronOptimizer | None) -> None:
    """Give every parameter without state, whose first step was skipped, the state that this step would give it."""
    for inner in inner_optimizers(optimizer):
        inner.init_state_fn = inner.init_state_fn or _fill_momentum
        inner.init_state_fn(inner.optimizer, inner.config)
    for owner, _, param in master_params(optimizer):
        if isinstance(owner, torch.optim.Adam):  # AdamW is a subclass
            owner.state[param].setdefault("step", torch.tensor(0.0))


def has_previous_update(optimizer: MegatronOptimizer) -> bool:
    """Whether a correction has left a previous update in the state of a parameter of this rank."""
    return any(PREVIOUS_UPDATE in owner.state[param] for owner, _, param in master_params(optimizer))


def expect_previous_update(optimizer: MegatronOptimizer) -> None:
    """Give every parameter a previous update, zero where it has none, and let Megatron save and load it."""
    for inner in inner_optimizers(optimizer):
        inner.extra_state_keys = (PREVIOUS_UPDATE,)
    for owner, _, param in master_params(optimizer):
        owner.state[param].setdefault(PREVIOUS_UPDATE, torch.zeros_like(param))


def fit(optimizer: MegatronOptimizer | None, state: dict[str, Any]) -> dict[str, Any]:
    """Fit a checkpoint's state besides tensors to this run's tree of optimizers.

    Each parameter group gets the progress of a saved group that agrees in all that Megatron tells groups apart by,
    except whether they hold experts and their rates. Hyper-parameters are this run's. Step counts are equal, unless
    updates of one of WPipe's chunks were skipped.
    """
    if "optimizer" in state and optimizer is not None:
        state["optimizer"] = _fitted(list(_leaves(state["optimizer"])), optimizer)
    return state


def _fitted(leaves: list[dict[str, Any]], optimizer: MegatronOptimizer) -> Any:
    chain = members(optimizer)
    if chain:
        parts = [_fitted(leaves, member) for member in chain]
        return dict(enumerate(parts)) if len(parts) > 1 else parts[0]
    if optimizer.is_stub_optimizer:
        return {}
    groups = optimizer.optimizer.param_groups
    for leaf in leaves:
        known = {_kind(group): group for group in _torch_state(leaf)["param_groups"]}
        if all(_kind(group) in known for group in groups):
            result = copy.deepcopy(leaf)
            _torch_state(result)["param_groups"] = [
                copy.deepcopy(known[_kind(group)])
                | {name: value for name, value in group.items() if name not in _PROGRESS}
                for group in groups
            ]
            return result
    return copy.deepcopy(leaves[0])  # Megatron names the missing group


def _kind(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(group.get(key) for key in param_group_identifier_keys if key not in (_EXPERTS, *_RATES))


def _leaves(saved: Any) -> Iterator[dict[str, Any]]:
    """The saved optimizers; a chain is saved as a dictionary by number."""
    if all(isinstance(key, int) for key in saved):
        for member in saved.values():
            yield from _leaves(member)
    else:
        yield saved


def _torch_state(leaf: dict[str, Any]) -> dict[str, Any]:
    """The part of the torch optimizer; optimizers with master weights save it one level down."""
    state: dict[str, Any] = leaf.get("optimizer", leaf)
    return state


def _fill_momentum(optimizer: torch.optim.Optimizer, config: Any) -> None:
    """Megatron has no such function for SGD. A momentum of zeros gives the same first step as none."""
    for group in optimizer.param_groups:
        for param in group["params"] if group.get("momentum") else ():
            if optimizer.state[param].get("momentum_buffer") is None:
                optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)
