# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Permanent patches of Megatron on every device. Megatron is imported when they are applied, not before."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_async.mcore.patches.patch import Patch


def _state_of_any_shape(original: Callable[..., Any]) -> Callable[..., Any]:
    """Describe optimizer state of another shape than the parameter's, such as a second moment for each row.

    It is kept whole, one object for each part of the parameter: it follows the parameter to another pipeline stage, not
    to another tensor-parallel size.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    @functools.wraps(original)
    def describe(param: Any, state: torch.Tensor, prefix: str) -> Any:
        parts = [param] if isinstance(param, ShardedTensor) else list(nested_values(param.build()))
        if state.shape == (param.data.shape if param.data is not None else parts[0].local_shape):
            return original(param, state, prefix)
        place = parts[0]
        name = "_".join(map(str, place.local_chunk_offset_in_global()))
        of = "_".join(map(str, place.axis_fragmentations))
        return ShardedObject(f"{prefix}.{param.key}.{name}_of_{of}", state, (1,), (0,), place.replica_id)

    return describe


def _restores_torch_state(original: Any) -> Any:
    """A distributed optimizer whose checkpoints fit torch's Adam and state that corrections add."""

    class RestoringDistributedOptimizer(original):  # type: ignore[misc]
        extra_state_keys: tuple[str, ...] = ()
        """State tensors to save besides those that Megatron knows."""

        @property
        def optimizer_state_keys(self) -> tuple[str, ...]:
            return (*super().optimizer_state_keys, *self.extra_state_keys)

        def _set_main_param_and_optimizer_states(self, model_param: Any, tensors: dict[str, Any]) -> None:
            # torch's step count is a tensor, and `load_state_dict` has restored it already.
            super()._set_main_param_and_optimizer_states(model_param, {**tensors, "step": None})

        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)
            # Megatron gives all parameters one tensor as step count. torch adds one to it for each parameter.
            for state in self.optimizer.state.values():
                if isinstance(state.get("step"), torch.Tensor):
                    state["step"] = state["step"].clone()

    return RestoringDistributedOptimizer


PATCHES: tuple[Patch, ...] = (
    Patch(
        "megatron.core.dist_checkpointing.optimizer:make_sharded_optimizer_tensor",
        "only optimizer state of the parameter's shape can be saved",
        "core/dist_checkpointing/optimizer.py: assert tuple(optim_param.shape) == model_param.local_shape",
        _state_of_any_shape,
    ),
    Patch(
        "megatron.core.optimizer:DistributedOptimizer",
        "the step count of torch's Adam is restored wrongly, and state that corrections add is not saved",
        'core/optimizer/distrib_optimizer.py: s["step"] = step',
        _restores_torch_state,
    ),
    Patch(
        "megatron.training.initialize:_compile_dependencies",
        "the data set helper is compiled in the wheel, without the Makefile that Megatron would call",
        'core/datasets/utils.py: command = ["make", "-C"',
        lambda original: lambda: torch.distributed.barrier(),
    ),
    # Runs on GPUs that need the kernels and lack them are refused with their arguments.
    Patch(
        "megatron.core.ssm.gated_delta_net.common:HAVE_FLA",
        "Gated DeltaNet insists on kernels that need a GPU; ours can compute in torch",
        "core/ssm/gated_delta_net/common.py: if not HAVE_FLA:",
        lambda original: True,
    ),
    Patch(
        "megatron.core.ssm.mamba_mixer:HAVE_MAMBA_SSM",
        "Mamba mixers insist on kernels that need a GPU; ours can compute in torch",
        "core/ssm/mamba_mixer.py: if not HAVE_MAMBA_SSM:",
        lambda original: True,
    ),
)
