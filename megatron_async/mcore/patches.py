# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""What of Megatron is replaced, on every device."""

import functools
from typing import Any

import torch
from megatron.core.dist_checkpointing import optimizer as _sharded_optimizer
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def _sharded_state(param: Any, state: torch.Tensor, prefix: str) -> Any:
    """Describe a tensor of an optimizer's state for a checkpoint.

    Megatron knows those of the parameter's shape. Others, such as a second moment for each row, are kept whole, one
    for each part of the parameter: they follow it to another pipeline stage, not to another tensor-parallel size.
    """
    parts = [param] if isinstance(param, ShardedTensor) else list(nested_values(param.build()))
    if state.shape == (param.data.shape if param.data is not None else parts[0].local_shape):
        return _megatron_sharded_state(param, state, prefix)
    place = parts[0]
    name = "_".join(map(str, place.local_chunk_offset_in_global()))
    of = "_".join(map(str, place.axis_fragmentations))
    return ShardedObject(f"{prefix}.{param.key}.{name}_of_{of}", state, (1,), (0,), place.replica_id)


_megatron_sharded_state = _sharded_optimizer.make_sharded_optimizer_tensor


_sharded_optimizer.make_sharded_optimizer_tensor = _sharded_state


_megatron_set_states = DistributedOptimizer._set_main_param_and_optimizer_states


def _set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
    """Megatron's, for torch's Adam: its step count is a tensor and has been restored already (`_load_optimizer`).

    Here it would be looked for in vain, or be set to the one that the optimizer had before the load.
    """
    _megatron_set_states(self, model_param, {**tensors, "step": None})


DistributedOptimizer._set_main_param_and_optimizer_states = _set_states


_megatron_load_optimizer = DistributedOptimizer.load_state_dict


@functools.wraps(_megatron_load_optimizer)
def _load_optimizer(self: Any, state_dict: Any) -> None:
    """Megatron's, with a step count for each parameter.

    Megatron makes one tensor of it for all of them (`s["step"] = step`). torch's Adam adds one to it for every
    parameter that it steps on, so that each would be corrected for another, too large number of steps.
    """
    _megatron_load_optimizer(self, state_dict)
    for state in self.optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()


DistributedOptimizer.load_state_dict = _load_optimizer


_megatron_state_keys = DistributedOptimizer.optimizer_state_keys.fget


# Megatron's list of the state tensors that it gathers and cuts, and those that `extra_state_keys` adds to it.
DistributedOptimizer.optimizer_state_keys = property(
    lambda self: (*_megatron_state_keys(self), *getattr(self, "extra_state_keys", ()))
)
