# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""What the micro-batches of a batch add up in a model chunk."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_async.pipeline.gradients import GradientGenerations
from megatron_async.pipeline.logits import LogitMaxima
from megatron_async.pipeline.router_bias import RouterBiases


@dataclass(frozen=True, slots=True)
class Accumulators:
    """Gradients, the routers' token counts and, where they are watched, the largest attention logits."""

    gradients: GradientGenerations
    routers: RouterBiases
    logits: LogitMaxima | None

    def use(self, batch: int) -> None:
        """Forwards, recomputed ones too, and backwards add to the sums of `batch` from now on."""
        self.gradients.use(batch)
        self.routers.use(batch)
        if self.logits is not None:
            self.logits.use(batch)

    def reduce_counts(self, batch: int) -> list[dist.Work | None]:
        """Start the sum of the token counts and the maximum of the logits over ranks."""
        return [self.routers.reduce(batch), None if self.logits is None else self.logits.reduce(batch)]

    def take_logits(self, batch: int) -> torch.Tensor | None:
        """The largest logits of `batch`, once, [softmax attentions, heads of this rank]; None where nothing watches."""
        return None if self.logits is None else self.logits.take(batch)
