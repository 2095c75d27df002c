# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class DotProductAttention(torch.nn.Module):
    """Causal attention over [sequence, micro-batch, heads, channels]."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | Sequence[int],
        *,
        num_gqa_groups: int | None = None,
        attn_mask_type: str,
        softmax_scale: float | None = None,
        attention_dropout: float,
        **_: Any,
    ) -> None:
        super().__init__()
        assert attn_mask_type == "causal" and attention_dropout == 0
        self._scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, attn_mask_type: str) -> Tensor:
        assert attn_mask_type == "causal"
        repeats = query.shape[2] // key.shape[2]
        key, value = (part.repeat_interleave(repeats, dim=2) for part in (key, value))
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        scores = query @ key.transpose(-1, -2) * (self._scale or query.shape[-1] ** -0.5)
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        shares = scores.masked_fill(future, float("-inf")).softmax(-1)
        return (shares @ value).permute(2, 0, 1, 3).flatten(2)

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        assert state is None or state.numel() == 0
