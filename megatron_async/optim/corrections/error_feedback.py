# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Error feedback, after equation (4) of arXiv 2606.30634.

With u_b the whole update of step b (learning rate and decoupled weight decay included) and strength k:

    W_(b+1) = W_b - u_b - k (u_b - u_(b-1))

The optimizer itself is not asked for u: it is the difference of the weights before and after its step.
"""

import torch
from torch import Tensor

from megatron_async.optim.corrections.base import Correction, data_of, remember, remembered


class ErrorFeedback(Correction):
    """Adds the strength-weighted change of the update to each update. Kept: the uncorrected update u."""

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
