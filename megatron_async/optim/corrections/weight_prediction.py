# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Weight prediction, SAPipe's, in the two forms that arXiv 2606.30634 compares with error feedback (B.1, table 10).

An accumulator y takes the plain updates; gradients are computed k updates ahead of it:

    y_(b+1) = y_b - u_b              weight decay inside u_b taken at y_b
    W_(b+1) = y_(b+1) - k v

with v = u_b ("same state"), or v the update that the same gradient would give once more, from the state after step b
("updated state": a second evaluation of the optimizer, whose effect on the state is undone).

Between steps the weights are W. A step first goes back to y, and then predicts again. With v = u_b the weights differ
from those of error feedback by the constant k u_0, the first update, which error feedback leaves uncorrected. The
accumulator is what is evaluated.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_async.optim.corrections.base import PREVIOUS_UPDATE, Correction, data_of, remember, remembered


class WeightPrediction(Correction):
    """Prediction with the update just made. Kept: the predicted displacement k v, zero while there is no delay.

    The accumulator before a step is kept in the same buffer while the step runs, so that nothing else is needed.
    """

    _ahead: list[Tensor]

    def before(self, optimizer: torch.optim.Optimizer, params: list[Tensor], active: bool) -> None:
        data, ahead = data_of(params), remembered(optimizer, params)
        if ahead is None:
            ahead = [torch.empty_like(weights) for weights in data]
        else:
            torch._foreach_add_(data, ahead)
        torch._foreach_copy_(ahead, data)
        self._ahead = ahead

    def after(self, optimizer: torch.optim.Optimizer, params: list[Tensor], active: bool) -> None:
        data, ahead = data_of(params), self._ahead
        del self._ahead
        # Not earlier: some optimizers allocate their state where a parameter has none at all.
        remember(optimizer, params, ahead)
        if not active:
            torch._foreach_zero_(ahead)
            return
        self.predict(optimizer, params, data, ahead)
        torch._foreach_mul_(ahead, self.strength)
        torch._foreach_sub_(data, ahead)

    def predict(
        self, optimizer: torch.optim.Optimizer, params: list[Tensor], data: list[Tensor], ahead: list[Tensor]
    ) -> None:
        """Turn `ahead`, which holds the accumulator before the step, into the update v; `data` is the accumulator."""
        torch._foreach_sub_(ahead, data)

    @contextmanager
    def newest_weights(self) -> Iterator[bool]:
        """The accumulator. On leaving, the weights are what they were to the last bit."""
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
    """Prediction with a second evaluation of the optimizer. While a piece is stepped, its state is copied once."""

    def predict(
        self, optimizer: torch.optim.Optimizer, params: list[Tensor], data: list[Tensor], ahead: list[Tensor]
    ) -> None:
        torch._foreach_copy_(ahead, data)
        buffers = [
            value
            for param in params
            for name, value in optimizer.state[param].items()
            if isinstance(value, Tensor) and name != PREVIOUS_UPDATE
        ]
        saved = [buffer.clone() for buffer in buffers]
        counters = [{name: group[name] for name in group if name == "step"} for group in optimizer.param_groups]
        with _fresh_ones_left_out(optimizer, params):
            optimizer.step()
        for buffer, value in zip(buffers, saved, strict=True):
            buffer.copy_(value)
        for group, counter in zip(optimizer.param_groups, counters, strict=True):
            group.update(counter)
        # ahead becomes v = y_(b+1) - (weights after the second evaluation), and the weights y_(b+1) again.
        second = [weights.clone() for weights in data]
        torch._foreach_copy_(data, ahead)
        torch._foreach_sub_(ahead, second)


@contextmanager
def _fresh_ones_left_out(optimizer: torch.optim.Optimizer, delayed: list[Tensor]) -> Iterator[None]:
    """Hide the gradients of the other parameters of a piece, which have no delay and must not be stepped again."""
    ids = set(map(id, delayed))
    hidden = [
        (param, param.grad) for group in optimizer.param_groups for param in group["params"] if id(param) not in ids
    ]
    for param, _ in hidden:
        param.grad = None
    try:
        yield
    finally:
        for param, gradient in hidden:
            param.grad = gradient
