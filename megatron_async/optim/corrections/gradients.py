# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Corrections of the gradient before the optimizer's step.

Delay compensation (DC-ASGD, arXiv 1609.08326) is a Taylor step with the squared gradient as diagonal of the Hessian:

    g_b + k g_b g_b (W_b - W_(b-1))                elementwise; g_b was computed at W_(b-1)

arXiv 2606.30634 (A.3) uses k from 1e4 to 1e8 with Muon: no effect up to 1e6, worse above.

Gradient error feedback is the negative control of arXiv 2606.30634 (A.10), where it diverges:

    g_b + k (g_b - g_(b-1))

The clipped and logged norm is that of the uncorrected gradient, except where "raw" corrects before clipping. The paper
says "raw gradients", not on which side of clipping that is.
"""

import torch
from torch import Tensor

from megatron_async.optim.corrections.base import Correction, data_of, delayed_params, remember, remembered
from megatron_async.optim.step import Piece


def _grads(params: list[Tensor]) -> list[Tensor]:
    return [param.grad for param in params if param.grad is not None]


class DelayCompensation(Correction):
    """DC-ASGD. Buffer: the last update W_(b-1) - W_b."""

    _weights: list[Tensor]

    def before(self, optimizer: torch.optim.Optimizer, params: list[Tensor], active: bool) -> None:
        grads, previous = _grads(params), remembered(optimizer, params)
        if active and previous is not None:
            # The buffers become the corrections.
            torch._foreach_mul_(previous, grads)
            torch._foreach_mul_(previous, grads)
            torch._foreach_add_(grads, previous, alpha=-self.strength)
        self._weights = [data.clone() for data in data_of(params)]

    def after(self, optimizer: torch.optim.Optimizer, params: list[Tensor], active: bool) -> None:
        updates = self._weights
        del self._weights
        torch._foreach_sub_(updates, data_of(params))
        remember(optimizer, params, updates)


class GradientErrorFeedback(Correction):
    """Error feedback on gradients. Buffer: the last uncorrected gradient."""

    def before(self, optimizer: torch.optim.Optimizer, params: list[Tensor], active: bool) -> None:
        grads, previous = _grads(params), remembered(optimizer, params)
        kept = [grad.clone() for grad in grads]
        if active and previous is not None:
            torch._foreach_sub_(previous, grads)
            torch._foreach_add_(grads, previous, alpha=-self.strength)
        self._kept = kept

    def after(self, optimizer: torch.optim.Optimizer, params: list[Tensor], active: bool) -> None:
        remember(optimizer, params, self._kept)
        del self._kept


class RawGradientErrorFeedback(GradientErrorFeedback):
    """Error feedback on gradients that are not clipped yet; the corrected gradient is clipped by its own norm."""

    _raw: dict[Tensor, Tensor]

    def before_norm(self, active: bool) -> None:
        self._raw = {}
        for optimizer in self.optimizers:
            params = delayed_params(Piece(optimizer, [p for group in optimizer.param_groups for p in group["params"]]))
            with torch.no_grad():
                super().before(optimizer, params, active and self.strength > 0)
            self._raw |= zip(params, self._kept, strict=True)

    def before(self, optimizer: torch.optim.Optimizer, params: list[Tensor], active: bool) -> None:
        self._kept = [self._raw[param] for param in params]
