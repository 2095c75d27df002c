# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet layers: Megatron's module, with a torch path for CPUs and document resets."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import GatedDeltaNet as MegatronGatedDeltaNet

from megatron_async.models.delta_rule import causal_convolution, document_starts, gated_delta_rule, l2_normalize


class GatedDeltaNet(MegatronGatedDeltaNet):
    """Linear attention by the gated delta rule (arXiv 2412.06464), on GPUs through flash-linear-attention.

    Parameters, their names and their split over tensor ranks are Megatron's. For `LayoutIndependentInit`, parameters
    also carry the sizes of the blocks that this rank has a share of, as Mamba's do, and how they are drawn.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.in_proj.weight.partition_sizes = self.in_proj_split_sections
        self.conv1d.weight.partition_sizes = (self.qk_dim_local_tp, self.qk_dim_local_tp, self.v_dim_local_tp)
        bound = 1 / math.sqrt(self.conv_kernel_dim)  # torch's default for a depthwise convolution
        smallest, largest = self.A_init_range
        if self.config.perform_initialization:
            self.conv1d.weight.initial_draw = lambda weight: weight.uniform_(-bound, bound)
            self.A_log.initial_draw = lambda weight: weight.uniform_(smallest, largest).log_()

    def _setup_variant_attrs(self) -> None:
        super()._setup_variant_attrs()
        self._in_torch = self.config.deterministic_mode or torch.device(torch.cuda.current_device()).type != "cuda"
        if self._in_torch:
            assert self.cp_size == 1, "refused with the arguments"
            self.gated_delta_rule = gated_delta_rule

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Like Megatron's: hidden states [sequence, batch, hidden] -> the same shape, and a bias or None.

        The torch path resets at the document starts of the attention mask.
        """
        if not self._in_torch:
            return super().forward(hidden_states, attention_mask, *args, **kwargs)
        projected, _ = self.in_proj(hidden_states)
        qkv, gate, beta, alpha = projected.transpose(0, 1).split(self.feat_dim_split, dim=-1)
        starts = document_starts(attention_mask)
        qkv = F.silu(causal_convolution(qkv, self.conv1d.weight.squeeze(1), starts))
        query, key, value = qkv.split([self.qk_dim_local_tp, self.qk_dim_local_tp, self.v_dim_local_tp], dim=-1)
        # Decays are computed in fp32: their exponentials add up over the whole sequence.
        log_decay = -self.A_log.float().exp() * F.softplus(alpha.float() + self.dt_bias.float())
        output, _ = gated_delta_rule(
            self._key_heads(query), self._key_heads(key), self._value_heads(value), log_decay, beta.sigmoid(), starts
        )
        gated = self.out_norm(output) * F.silu(self._value_heads(gate).float())
        return self.out_proj(gated.type_as(output).flatten(2).transpose(0, 1).contiguous())

    def _key_heads(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, local key heads x size] -> [batch, sequence, local value heads, size], normalized."""
        heads = l2_normalize(x.unflatten(-1, (-1, self.key_head_dim)))
        return heads.repeat_interleave(self.num_value_heads // self.num_key_heads, dim=2)

    def _value_heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.value_head_dim))
