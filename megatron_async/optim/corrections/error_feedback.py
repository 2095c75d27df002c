# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Error feedback, equation (4) of arXiv 2606.30634.

u_b is the update of step b with learning rate and decoupled weight decay, k the strength:

    W_(b+1) = W_b - u_b - k (u_b - u_(b-1))

u is computed as the difference of the weights before and after the optimizer's step.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_async.optim.corrections.base import Correction, remember, remembered


class ErrorFeedback(Correction):
    """Error feedback. Buffer: the uncorrected update u."""

    def around(self, optimizer: torch.optim.Optimizer, params: list[Tensor], active: bool) -> Iterator[None]:
        updates = [param.clone() for param in params]
        yield
        torch._foreach_sub_(updates, params)
        previous = remembered(optimizer, params)
        if active and previous is not None:
            torch._foreach_sub_(previous, updates)
            torch._foreach_add_(params, previous, alpha=self.strength)
        remember(optimizer, params, updates)
