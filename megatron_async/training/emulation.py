# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Emulated compute: stages that sleep instead of computing, so that schedules and transport run for real.

Many stages then share few cores without slowing each other down. Losses mean nothing under emulation.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.utils import get_attr_wrapped_model

from megatron_async.models import gpt


@dataclass(frozen=True, slots=True)
class EmulatedCompute:
    """Times of one micro-batch through all layers of a rank, in milliseconds."""

    forward_ms: float
    backward_ms: float

    @classmethod
    def parse(cls, text: str) -> "EmulatedCompute":
        """Read "F,B".

        Raises:
            ValueError: anything but two positive finite numbers.
        """
        parts = text.split(",")
        try:
            forward, backward = (float(part) for part in parts)
        except ValueError:
            raise ValueError(f"{text!r}: must be two numbers F,B in milliseconds, such as 30,60") from None
        if not (0 < forward < float("inf") and 0 < backward < float("inf")):
            raise ValueError(f"{text!r}: both times must be positive and finite")
        return cls(forward, backward)


def sleep_ms(milliseconds: float) -> None:
    """Stand in for so much compute without using the core."""
    if milliseconds > 0:
        time.sleep(milliseconds / 1000)


class _Sleep(torch.autograd.Function):
    """Identity that takes time in both directions."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, forward_ms: float, backward_ms: float) -> torch.Tensor:
        ctx.backward_ms = backward_ms
        sleep_ms(forward_ms)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        sleep_ms(ctx.backward_ms)
        return gradients[0], None, None


def sleeping(tensor: torch.Tensor, *, forward_ms: float, backward_ms: float) -> torch.Tensor:
    """A copy of `tensor` that takes `forward_ms` now, and `backward_ms` when its gradient passes back."""
    result: torch.Tensor = _Sleep.apply(tensor, forward_ms, backward_ms)  # type: ignore[no-untyped-call]
    return result


class EmulatedForwardStep:
    """Megatron's forward step function with sleeps in place of the model.

    The stage's input passes on unchanged, except that one element of each of the chunk's parameters is added with
    factor zero: every parameter has a gradient, and the optimizer has its usual work.

    Args:
        compute: times of a rank; each of its chunks takes an equal share.
        chunks: model chunks of a rank.
        shape: activations between stages, [sequence, micro-batch, hidden].
        dtype: their type.
    """

    def __init__(self, compute: EmulatedCompute, *, chunks: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._forward_ms, self._backward_ms = compute.forward_ms / chunks, compute.backward_ms / chunks
        self._shape, self._dtype = shape, dtype

    def __call__(self, data_iterator: Iterator[Any] | None, model: Any) -> tuple[torch.Tensor, Any]:
        chunk = get_attr_wrapped_model(model, "pre_process", return_model_obj=True)
        touched = sum(param.view(-1)[0].to(self._dtype) for param in chunk.parameters()) * 0.0
        source = torch.zeros(self._shape, dtype=self._dtype) if chunk.pre_process else chunk.decoder.input_tensor
        output = sleeping(source + touched, forward_ms=self._forward_ms, backward_ms=self._backward_ms)
        if not chunk.post_process:
            return output, None
        return output.float().square().mean(dim=-1).transpose(0, 1), _loss


def _loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    return gpt.loss(torch.ones_like(losses), losses)
