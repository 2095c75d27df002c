# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Weight prediction of SAPipe, in the two forms of arXiv 2606.30634 (B.1, table 10).

The accumulator y receives the uncorrected updates. Gradients are computed at W, k updates ahead of y:

    y_(b+1) = y_b - u_b              with weight decay at y_b
    W_(b+1) = y_(b+1) - k v

"Same state": v = u_b. "Updated state": v is the update of a second optimizer step with the same gradient; the optimizer
state is restored afterwards.

The weights are W between steps and y during a step. Evaluation uses y. The first update predicts too. With v = u_b,
W differs from the weights of error feedback by the constant k u_0: error feedback does not correct the first update.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_async.optim.corrections.base import PREVIOUS_UPDATE, Correction, remember, remembered
from megatron_async.optim.step import only


class WeightPrediction(Correction):
    """Prediction with the last update ("same state"). Buffer: k v, zero while there is no delay.

    During a step the buffer holds the accumulator before the step.
    """

    from_first_update = True

    def around(self, optimizer: torch.optim.Optimizer, params: list[Tensor], active: bool) -> Iterator[None]:
        ahead = remembered(optimizer, params)
        if ahead is None:
            ahead = [torch.empty_like(param) for param in params]
        else:
            torch._foreach_add_(params, ahead)
        torch._foreach_copy_(ahead, params)
        yield
        # Not before the step: some optimizers initialize only an empty state.
        remember(optimizer, params, ahead)
        if not active:
            torch._foreach_zero_(ahead)
            return
        self.predict(optimizer, params, ahead)
        torch._foreach_mul_(ahead, self.strength)
        torch._foreach_sub_(params, ahead)

    def predict(self, optimizer: torch.optim.Optimizer, params: list[Tensor], ahead: list[Tensor]) -> None:
        """Replace `ahead`, the accumulator before the step, by v. `params` hold the accumulator after the step."""
        torch._foreach_sub_(ahead, params)

    @contextmanager
    def newest_weights(self) -> Iterator[bool]:
        """Use the accumulator; restore the training weights bit for bit on exit."""
        kept: list[tuple[Tensor, Tensor]] = []
        with torch.no_grad():
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    for param in group["params"]:
                        ahead = optimizer.state[param].get(PREVIOUS_UPDATE)
                        if ahead is not None:
                            kept.append((param.detach(), param.detach().clone()))
                            param.detach().add_(ahead)
        try:
            yield True
        finally:
            with torch.no_grad():
                for weights, before in kept:
                    weights.copy_(before)


class UpdatedWeightPrediction(WeightPrediction):
    """Prediction with a second optimizer step ("updated state"). Copies the state of one piece at a time."""

    def predict(self, optimizer: torch.optim.Optimizer, params: list[Tensor], ahead: list[Tensor]) -> None:
        torch._foreach_copy_(ahead, params)
        buffers = [
            value
            for param in params
            for name, value in optimizer.state[param].items()
            if isinstance(value, Tensor) and name != PREVIOUS_UPDATE
        ]
        saved = [buffer.clone() for buffer in buffers]
        delayed = set(map(id, params))
        with only(
            optimizer, [[own for own in group["params"] if id(own) in delayed] for group in optimizer.param_groups]
        ):
            optimizer.step()
        for buffer, value in zip(buffers, saved, strict=True):
            buffer.copy_(value)
        # v = y_(b+1) - (weights after the second step); then restore y_(b+1).
        second = [param.clone() for param in params]
        torch._foreach_copy_(params, ahead)
        torch._foreach_sub_(ahead, second)
