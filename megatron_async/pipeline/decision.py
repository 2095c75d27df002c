# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Norm, clip factor and whether an update applies: one text for values on the host and on the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_async.optim.step import clip_factor


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """How gradients are scaled and clipped.

    Attributes:
        clip_grad: largest allowed norm; 0 for no clipping.
        per_token: the loss is a sum over tokens, so gradients are divided by the batch's number of tokens.
        stage_norm: the norm is that of this stage alone (PipeDream), not of all stages.
        lag: values shared by all ranks arrive so many updates later, so that no stage waits for another. The same
            number on every rank; at least the number of stages where each has a norm of its own.
    """

    clip_grad: float
    per_token: bool
    stage_norm: bool = False
    lag: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens to the gradients of a batch. All are 0-dim tensors on one device, numbers in float64.

    Attributes:
        grad_norm: L2 norm before clipping, over all ranks of the chunk.
        applies: whether the norm is finite; if not, the update changes nothing.
        factor: of the gradients, for normalization and clipping.
    """

    grad_norm: Tensor
    applies: Tensor
    factor: Tensor


def decide(squares: Sequence[Tensor], tokens: Tensor | None, rule: UpdateRule) -> Decision:
    """The decision from sums over ranks.

    Args:
        squares: sum of squares of each norm group, 0-dim, float64.
        tokens: number of tokens of the batch, 0-dim, where it is known.
        rule: scaling and clipping.
    """
    norm = sum(squares[1:], start=squares[0]).sqrt()
    applies = norm.isfinite()
    scale = torch.ones_like(norm)
    if rule.per_token and tokens is not None:
        scale = 1.0 / tokens.clamp(min=1.0)
    norm = norm * scale
    return Decision(norm, applies, torch.where(applies, scale * clip_factor(norm, rule.clip_grad), 0.0))
