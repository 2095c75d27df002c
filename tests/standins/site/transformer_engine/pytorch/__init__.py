# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
from transformer_engine.pytorch import distributed, fp8, optimizers, tensor
from transformer_engine.pytorch.attention import DotProductAttention
from transformer_engine.pytorch.module import GroupedLinear, LayerNormLinear, Linear, RMSNorm

__all__ = [
    "DotProductAttention",
    "GroupedLinear",
    "LayerNormLinear",
    "Linear",
    "RMSNorm",
    "distributed",
    "fp8",
    "optimizers",
    "tensor",
]
