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

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_async.optim.corrections.base import Correction, delayed_params, gradients_of, remember, remembered
from megatron_async.optim.step import Piece


class DelayCompensation(Correction):
    """DC-ASGD. Buffer: the last update W_(b-1) - W_b."""

    def around(self, optimizer: torch.optim.Optimizer, params: list[Tensor], active: bool) -> Iterator[None]:
        grads, previous = gradients_of(params), remembered(optimizer, params)
        if active and previous is not None:
            # The buffers become the corrections.
            torch._foreach_mul_(previous, grads)
            torch._foreach_mul_(previous, grads)
            torch._foreach_add_(grads, previous, alpha=-self.strength)
        updates = [param.clone() for param in params]
        yield
        torch._foreach_sub_(updates, params)
        remember(optimizer, params, updates)


class GradientErrorFeedback(Correction):
    """Error feedback on gradients. Buffer: the last uncorrected gradient."""

    def around(self, optimizer: torch.optim.Optimizer, params: list[Tensor], active: bool) -> Iterator[None]:
        uncorrected = self.correct(optimizer, params, active)
        yield
        remember(optimizer, params, uncorrected)

    def correct(self, optimizer: torch.optim.Optimizer, params: list[Tensor], active: bool) -> list[Tensor]:
        """Correct the gradients in place; return copies of the uncorrected ones."""
        grads, previous = gradients_of(params), remembered(optimizer, params)
        uncorrected = [grad.clone() for grad in grads]
        if active and previous is not None:
            torch._foreach_sub_(previous, grads)
            torch._foreach_add_(grads, previous, alpha=-self.strength)
        return uncorrected


class RawGradientErrorFeedback(GradientErrorFeedback):
    """Error feedback on gradients that are not clipped yet; the corrected gradient is clipped by its own norm."""

    @torch.no_grad()
    def before_norm(self, active: bool) -> None:
        self._raw: dict[Tensor, Tensor] = {}
        for optimizer in self.optimizers:
            params = delayed_params(Piece(optimizer, [p for group in optimizer.param_groups for p in group["params"]]))
            self._raw |= zip(params, self.correct(optimizer, params, self._active(active)), strict=True)

    def around(self, optimizer: torch.optim.Optimizer, params: list[Tensor], active: bool) -> Iterator[None]:
        yield
        remember(optimizer, params, [self._raw[param] for param in params])
