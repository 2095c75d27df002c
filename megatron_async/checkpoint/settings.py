# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""What optimizers save besides tensors (step counts, settings of parameter groups), for other optimizers.

Tensors are saved under the names of their parameters, whichever optimizer they belong to. The rest is saved as a tree
of optimizers, and that tree depends on the layout and schedule: WPipe has one for each chunk, and experts have one of
their own where they are spread over ranks.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.core.optimizer.optimizer import MegatronOptimizer, param_group_identifier_keys

from megatron_async.mcore.optimizer import members as chain_members


def fitted(saved: Any, optimizer: MegatronOptimizer) -> Any:
    """The saved tree in the shape of `optimizer`'s: each group of parameters with the settings of one like it.

    Groups are alike where all that Megatron tells them apart by agrees, except whether they hold experts. Step counts
    are the same for all, unless updates of one of WPipe's chunks were skipped.
    """
    return _fitted(list(_leaves(saved)), optimizer)


def _fitted(leaves: list[dict[str, Any]], optimizer: MegatronOptimizer) -> Any:
    members = chain_members(optimizer)
    if len(members) > 1:
        return {index: _fitted(leaves, member) for index, member in enumerate(members)}
    if members:
        return _fitted(leaves, members[0])
    if optimizer.is_stub_optimizer:
        return {}
    groups = optimizer.optimizer.param_groups
    for leaf in leaves:
        known = {_kind(group): group for group in _torch_state(leaf)["param_groups"]}
        if all(_kind(group) in known for group in groups):
            result = copy.deepcopy(leaf)
            _torch_state(result)["param_groups"] = [
                copy.deepcopy(known[_kind(group)]) | {_EXPERTS: group[_EXPERTS]} for group in groups
            ]
            return result
    return copy.deepcopy(leaves[0])  # Megatron names the group that is missing


_EXPERTS = "is_expert_parallel"


def _kind(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(group.get(key) for key in param_group_identifier_keys if key != _EXPERTS)


def _leaves(saved: Any) -> Iterator[dict[str, Any]]:
    """The saved optimizers; a chain of them is saved as a dictionary by number."""
    if all(isinstance(key, int) for key in saved):
        for member in saved.values():
            yield from _leaves(member)
    else:
        yield saved


def _torch_state(leaf: dict[str, Any]) -> dict[str, Any]:
    """The torch optimizer's part; optimizers with master weights save it beside them."""
    state: dict[str, Any] = leaf.get("optimizer", leaf)
    return state
