# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Mamba-2 mixers: Megatron's module, with a torch path for CPUs."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm.mamba_mixer import MambaMixer as MegatronMambaMixer
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megatron_async.models.delta_rule import causal_convolution
from megatron_async.models.state_space import state_space_scan

_STEPS = 1e-3, 1e-1
"""Range of the initial dt, and the least of what is drawn: defaults of Megatron's mixer and of mamba-ssm."""
_LEAST_STEP = 1e-4


class GroupedNorm(torch.nn.Module):
    """RMSNorm within each group of channels: the norm of a mixer's gated output.

    Args:
        channels: of this tensor rank.
        groups: of this tensor rank.
        dtype: of the weight.
        shards: tensor-parallel group over which the weight [channels] is cut.
    """

    EPS = 1e-5  # as in Megatron's mixer

    def __init__(self, channels: int, groups: int, dtype: torch.dtype, shards: Any) -> None:
        super().__init__()
        self._groups, self._shards = groups, shards
        self.weight = torch.nn.Parameter(torch.ones(channels, dtype=dtype, device=torch.cuda.current_device()))
        self.weight.tensor_model_parallel, self.weight.partition_dim = True, 0  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grouped = x.float().unflatten(-1, (self._groups, -1))
        return (F.rms_norm(grouped, grouped.shape[-1:], eps=self.EPS).flatten(-2) * self.weight.float()).type_as(x)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Megatron's description of the weight for checkpoints, with the name of its own norm."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self._shards,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )


class MambaMixer(MegatronMambaMixer):
    """A Mamba-2 mixer (arXiv 2405.21060), on GPUs through mamba-ssm.

    Parameters, their names and their split over tensor ranks are Megatron's. For matrix optimizers the mixer says where
    its fused projection splits; for `LayoutIndependentInit` parameters carry how they are drawn.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        in_torch = config.deterministic_mode or torch.device(torch.cuda.current_device()).type != "cuda"
        super().__init__(config, *args, rmsnorm=not in_torch, **kwargs)
        self._in_torch = in_torch
        if in_torch:  # the norm that Megatron would build is mamba-ssm's
            groups, dtype = self.ngroups_local_tp, config.params_dtype
            self.norm = GroupedNorm(self.d_inner_local_tp, groups, dtype, self.pg_collection.tp)
        self.in_proj_split_sections = self.in_proj.weight.partition_sizes
        if config.perform_initialization:
            bound = 1 / math.sqrt(self.d_conv)  # torch's default for a depthwise convolution
            self.conv1d_weight.initial_draw = lambda weight: weight.uniform_(-bound, bound)
            self.conv1d_bias.initial_draw = lambda bias: bias.uniform_(-bound, bound)
            self.A_log.initial_draw = lambda decay: decay.uniform_(1, 16).log_()
            self.dt_bias.initial_draw = _draw_steps

    def _ssm_training(self, zxBCdt: torch.Tensor, packed_seq_params: Any = None) -> torch.Tensor:
        """Like Megatron's: [sequence, batch, z x B C dt] -> [sequence, batch, local inner size]."""
        if not self._in_torch:
            return super()._ssm_training(zxBCdt, packed_seq_params)
        assert packed_seq_params is None, "refused with the arguments"
        inner, mapped = self.d_inner_local_tp, self.ngroups_local_tp * self.d_state
        z, xbc, steps = zxBCdt.transpose(0, 1).split([inner, inner + 2 * mapped, self.nheads_local_tp], dim=-1)
        xbc = F.silu(causal_convolution(xbc, self.conv1d_weight.squeeze(1)) + self.conv1d_bias)
        x, inputs, outputs = xbc.split([inner, mapped, mapped], dim=-1)
        y = state_space_scan(
            x.unflatten(-1, (-1, self.headdim)),
            F.softplus(steps.float() + self.dt_bias.float()),
            -self.A_log.float().exp(),
            inputs.unflatten(-1, (-1, self.d_state)),
            outputs.unflatten(-1, (-1, self.d_state)),
            self.D,
        )
        gated = y.flatten(-2) * F.silu(z)
        return self.norm(gated).transpose(0, 1).contiguous()


def _draw_steps(bias: torch.Tensor) -> None:
    """Draw dt log-uniformly and store its inverse softplus."""
    low, high = (math.log(step) for step in _STEPS)
    steps = bias.uniform_(low, high).exp_().clamp_(min=_LEAST_STEP)
    bias.copy_(steps + torch.log(-torch.expm1(-steps)))
