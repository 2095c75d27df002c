# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""RMSNorm for local (torch) modules; Megatron's own refuses sequence parallelism."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region


class RMSNorm(torch.nn.Module):
    """x / sqrt(mean(x²) + eps) * weight, over the last dimension (arXiv 1910.07467).

    Args:
        config: Megatron's TransformerConfig. With `sequence_parallel` a tensor rank sees a part of the tokens, so the
            weight is marked for Megatron's sum of its gradient over the tensor ranks. With
            `layernorm_zero_centered_gamma` the factor is 1 + weight.
        hidden_size: size of the last dimension.
        eps: as in the formula.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **ignored: Any) -> None:
        super().__init__()
        self.eps, self.zero_centered = eps, config.layernorm_zero_centered_gamma
        initial = torch.zeros if self.zero_centered else torch.ones
        self.weight = torch.nn.Parameter(
            initial(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, zero_centered=self.zero_centered)


class HeadNorm(torch.nn.Module):
    """RMSNorm of each head's output, one weight [head size] for all heads, never zero-centered (as in Qwen3-Next).

    Every tensor rank normalizes its own heads, so the gradient of the weight is the sum over the tensor ranks. It is
    summed in backward, because without sequence parallelism Megatron's reductions leave this weight out.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **ignored: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, copy_to_tensor_model_parallel_region(self.weight), self.eps, zero_centered=False)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, zero_centered: bool) -> torch.Tensor:
    """The formula of `RMSNorm`; in fp32 where the factor is 1 + weight, a sum that bf16 would round."""
    if not zero_centered:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, 1.0 + weight.float(), eps).type_as(x)
