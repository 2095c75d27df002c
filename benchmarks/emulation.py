# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Emulated compute in a whole training run."""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.utils import get_attr_wrapped_model

from benchmarks.stack import sleeping
from megatron_async.models import gpt


class SleepingForwardStep:
    """Megatron's forward step function with sleeps in place of the model; for `run.build(forward_step=...)`.

    Schedules and communication run for real, and many stages share few cores. Losses mean nothing.

    The input passes on unchanged. One element of each parameter is added with factor zero, so that all parameters have
    a gradient and the optimizer has its usual work.

    Args:
        forward_ms, backward_ms: times of one micro-batch on a rank; each of its chunks takes an equal share.
        chunks: model chunks of a rank.
        shape: activations between stages, [sequence, micro-batch, hidden].
    """

    def __init__(self, forward_ms: float, backward_ms: float, *, chunks: int, shape: tuple[int, ...]) -> None:
        self._times = {"forward_ms": forward_ms / chunks, "backward_ms": backward_ms / chunks}
        self._shape = shape

    def __call__(self, data_iterator: Iterator[Any] | None, model: Any) -> tuple[torch.Tensor, Any]:
        chunk = get_attr_wrapped_model(model, "pre_process", return_model_obj=True)
        touched = torch.stack([param.view(-1)[0] for param in chunk.parameters()]).sum() * 0.0
        source = touched.new_zeros(self._shape) if chunk.pre_process else chunk.decoder.input_tensor
        output = sleeping(source + touched, **self._times)
        if not chunk.post_process:
            return output, None
        return output.float().square().mean(dim=-1).transpose(0, 1), _loss


def _loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    return gpt.loss(torch.ones_like(losses), losses)
