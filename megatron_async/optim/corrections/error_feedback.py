# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Error feedback, equation (4) of arXiv 2606.30634.

u_b is the update of step b with learning rate and decoupled weight decay, k the strength:

    W_(b+1) = W_b - u_b - k (u_b - u_(b-1))

u is computed as the difference of the weights before and after the optimizer's step.
"""

import torch
from torch import Tensor

from megatron_async.optim.corrections.base import Correction, data_of, remember, remembered


class ErrorFeedback(Correction):
    """Error feedback. Buffer: the uncorrected update u."""

    _weights: list[Tensor]

    def before(self, optimizer: torch.optim.Optimizer, params: list[Tensor], active: bool) -> None:
        self._weights = [data.clone() for data in data_of(params)]

    def after(self, optimizer: torch.optim.Optimizer, params: list[Tensor], active: bool) -> None:
        data, updates = data_of(params), self._weights
        del self._weights
        torch._foreach_sub_(updates, data)
        previous = remembered(optimizer, params)
        if active and previous is not None:
            torch._foreach_sub_(previous, updates)
            torch._foreach_add_(data, previous, alpha=self.strength)
        remember(optimizer, params, updates)
