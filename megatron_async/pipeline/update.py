# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A batch's gradients on their way into the next weights: reductions that nobody waits for, then one update.

`start(b)` is the schedule's R(b), `apply(b)` its U(b). Clipping uses the global norm over all stages, exactly as a
synchronous run does; the schedule leaves enough time between R and U for the norm to arrive behind compute.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_async import megatron
from megatron_async.pipeline.gradients import GradientGenerations
from megatron_async.pipeline.host import HostValues
from megatron_async.pipeline.reduction import Reduction, Steps
from megatron_async.pipeline.weights import WeightVersions

# Megatron adds this to the norm before it divides (core/optimizer/clip_grads.py).
_CLIP_EPSILON = 1.0e-6


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """What one update found.

    Attributes:
        batch: number of the batch, from 0.
        grad_norm: global L2 norm before clipping.
        skipped: whether a non-finite norm made the update a no-op, on every rank alike.
        shared: sums over all ranks of the values given to `start`.
    """

    batch: int
    grad_norm: float
    skipped: bool
    shared: tuple[float, ...]


class DeferredUpdate:
    """Reduces and applies the gradients of one model chunk.

    Args:
        chunk: the chunk, wrapped by Megatron's DistributedDataParallel.
        optimizer: Megatron's optimizer of the chunk.
        weights, gradients: versions and generations of the chunk.
        clip_grad: largest allowed global norm; 0 for no clipping.
    """

    def __init__(
        self,
        *,
        chunk: Any,
        optimizer: megatron.MegatronOptimizer,
        weights: WeightVersions,
        gradients: GradientGenerations,
        clip_grad: float,
    ) -> None:
        self._chunk, self._optimizer = chunk, optimizer
        self._weights, self._gradients = weights, gradients
        self._clip_grad = clip_grad
        self._inner = list(megatron.inner_optimizers(optimizer))
        self._model_params = tuple(param for param in chunk.parameters())
        self._tied_embedding = megatron.tied_embedding(chunk)
        self._in_flight: dict[int, Reduction] = {}
        self._results: dict[int, HostValues] = {}
        self._norm_groups = self._groups_for_norm()

    def start(self, batch: int, shared: Sequence[float]) -> None:
        """All gradients of `batch` are here: start the reductions.

        Args:
            batch: number of the batch.
            shared: numbers to be summed over all ranks on the way, the same count on every rank.
        """
        self._in_flight[batch] = Reduction(self._reduce(batch, shared))

    def poll(self) -> None:
        """Let reductions go on whose last step is complete."""
        for reduction in self._in_flight.values():
            reduction.poll()

    def apply(self, batch: int) -> UpdateReport:
        """Clip, step and publish the next weight version; the reductions must be done by now, else wait."""
        self._in_flight.pop(batch).finish()
        values = self._results.pop(batch).read()
        squares, shared = values[: len(self._norm_groups)], values[len(self._norm_groups) :]
        grad_norm = math.sqrt(sum(squares)) if all(math.isfinite(square) for square in squares) else math.nan
        skipped = not math.isfinite(grad_norm)
        accumulating = self._gradients.used
        self._weights.open_next()
        if not skipped:
            self._gradients.use(batch)
            self._step(grad_norm)
        self._weights.publish_next()
        self._gradients.clear(batch)
        self._gradients.use(accumulating)
        return UpdateReport(batch=batch, grad_norm=grad_norm, skipped=skipped, shared=tuple(shared))

    @torch.no_grad()
    def _step(self, grad_norm: float) -> None:
        self._optimizer.prepare_grads()
        factor = self._clip_grad / (grad_norm + _CLIP_EPSILON) if self._clip_grad > 0 else 1.0
        if factor < 1.0:
            grads = [param.grad for inner in self._inner for param in inner.get_parameters() if param.grad is not None]
            torch._foreach_mul_(grads, factor)
        # Graphs in flight were recorded with other buffers behind these parameters; an in-place step on them is no
        # change to what those graphs saved, so it must not count as one.
        with torch.autograd._unsafe_preserve_version_counter(self._model_params):
            self._optimizer.step_with_ready_grads()
        self._optimizer.zero_grad()

    @torch.no_grad()
    def _reduce(self, batch: int, shared: Sequence[float]) -> Steps:
        yield [self._reduce_buffer(buffer, flat) for buffer, flat in self._gradients.flat(batch)]
        if self._tied_embedding is not None:
            yield [self._reduce_tied_embedding(batch)]
        sums = self._local_squares(batch)
        own = torch.tensor(shared, dtype=torch.float32, device=sums[0].device)
        works = [
            dist.all_reduce(square, group=group, async_op=True)
            for square, group in zip(sums, self._norm_groups, strict=True)
        ]
        if len(own):
            works.append(dist.all_reduce(own, async_op=True))
        yield works
        self._results[batch] = HostValues(torch.cat([*sums, own]))

    @staticmethod
    def _reduce_buffer(buffer: Any, flat: torch.Tensor) -> dist.Work | None:
        if buffer.gradient_scaling_factor != 1.0:
            flat.mul_(buffer.gradient_scaling_factor)
        if buffer.data_parallel_world_size == 1:
            return None
        return dist.all_reduce(flat, group=buffer.data_parallel_group, async_op=True)

    def _reduce_tied_embedding(self, batch: int) -> dist.Work | None:
        """The input embedding on the first stage and the head on the last one are the same weight: sum both gradients."""
        assert self._tied_embedding is not None
        accumulating = self._gradients.used
        self._gradients.use(batch)
        gradient = self._tied_embedding.main_grad  # type: ignore[attr-defined]
        self._gradients.use(accumulating)
        return dist.all_reduce(gradient, group=megatron.mpu.get_embedding_group(), async_op=True)

    def _groups_for_norm(self) -> list[dist.ProcessGroup]:
        """Groups whose ranks hold different parts of the gradient; optimizers that share a group are summed together."""
        groups = [inner.get_grad_stats_parallel_group() for inner in self._inner]
        return list(dict.fromkeys(groups))

    def _local_squares(self, batch: int) -> list[torch.Tensor]:
        """Sum of squares of this rank's gradients, one fp32 tensor of one element for each group of `_norm_groups`."""
        accumulating = self._gradients.used
        self._gradients.use(batch)
        self._optimizer.prepare_grads()
        parts: dict[dist.ProcessGroup, list[torch.Tensor]] = defaultdict(list)
        for inner in self._inner:
            parts[inner.get_grad_stats_parallel_group()] += inner.get_grads_for_grad_norm()
        squares = [_sum_of_squares(parts[group]) for group in self._norm_groups]
        # A parameter's .grad must be empty while backward passes run: autograd would add to it in place.
        self._optimizer.zero_grad()
        self._gradients.use(accumulating)
        return squares


def _sum_of_squares(gradients: list[torch.Tensor]) -> torch.Tensor:
    if not gradients:
        return torch.zeros(1, dtype=torch.float32, device=megatron.device())
    norms = torch._foreach_norm(gradients)
    return torch.stack(list(norms)).float().square().sum().view(1)
