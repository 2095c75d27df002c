# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The update of a chunk: non-blocking reductions of a batch's gradients, then one optimizer step.

`start(b)` is the schedule's R(b); `wait(b)` and `apply(b)` are its U(b). Gradients are clipped by the global norm over
all ranks that hold a part of them, exactly as in a synchronous run. The schedule leaves enough time between R and U for
the norm to arrive behind compute.

Collectives that `start` itself launches run at a fixed place of the schedule; they may share groups with compute. Later
ones are launched when an earlier one is found complete, at moments that differ between ranks. They have groups of their
own for each chunk, in the order of the batches: values of two batches or chunks must not be added to each other.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from megatron_async.mcore.model import tied_embedding
from megatron_async.mcore.optimizer import norm_groups, publish_weights
from megatron_async.mcore.parallel import device, reduce_over_tensor_parallel
from megatron_async.optim.step import MasterStep, StepContext, clip_factor
from megatron_async.pipeline.gradients import FlatGradients, GradientGenerations
from megatron_async.pipeline.groups import GroupKey, make_groups
from megatron_async.pipeline.logits import LogitMaxima
from megatron_async.pipeline.reduction import Reduction, Steps, poll_in_order
from megatron_async.pipeline.router_bias import RouterBiases
from megatron_async.pipeline.weights import WeightVersions
from megatron_async.platform.host import HostValues, to_device


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """The result of one update.

    Attributes:
        chunk: model chunk of this rank.
        batch: number of the batch, from 0.
        grad_norm: L2 norm before clipping, over all ranks of the chunk.
        skipped: whether a non-finite norm made the update a no-op, on every rank alike.
        shared: sums over all ranks of the values given to `start` for this batch, or for the one `UpdateRule.lag`
            updates ago; empty while there is none.
        logits: largest attention logits of the batch, [softmax attentions, heads of this rank], where they are watched.
    """

    chunk: int
    batch: int
    grad_norm: float
    skipped: bool
    shared: tuple[float, ...]
    logits: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """How gradients are scaled and clipped.

    Attributes:
        clip_grad: largest allowed norm; 0 for no clipping.
        per_token: the loss is a sum over tokens, so gradients are divided by the batch's number of tokens.
        stage_norm: the norm is that of this stage alone (PipeDream), not of all stages.
        lag: values shared by all ranks arrive so many updates later, so that no stage waits for another. The same
            number on every rank; at least the number of stages where each has a norm of its own.
    """

    clip_grad: float
    per_token: bool
    stage_norm: bool = False
    lag: int = 0


class DeferredUpdate:
    """Reduces and applies the gradients of one model chunk.

    Args:
        index: number of the chunk on this rank.
        chunk: the chunk, wrapped by Megatron's DistributedDataParallel.
        optimizer: Megatron's optimizer of the chunk and nothing else.
        weights, gradients, routers, logits: what a batch changes and accumulates.
        master_step: steps the master weights through an explicit list of parts.
        corrected: number of a batch -> whether the correction of the delay applies to its update.
        rule: clipping and normalization.
        timeout: of its collectives; None for torch's default.
    """

    def __init__(
        self,
        *,
        index: int,
        chunk: Any,
        optimizer: MegatronOptimizer,
        weights: WeightVersions,
        gradients: GradientGenerations,
        routers: RouterBiases,
        logits: LogitMaxima | None,
        master_step: MasterStep,
        corrected: Callable[[int], bool],
        rule: UpdateRule,
        timeout: timedelta | None = None,
    ) -> None:
        self._index, self._chunk, self._optimizer = index, chunk, optimizer
        self._weights, self._gradients, self._routers, self._rule = weights, gradients, routers, rule
        self._logits, self._master_step, self._corrected = logits, master_step, corrected
        self._model_params = tuple(chunk.parameters())
        self._tied_embedding = tied_embedding(chunk)
        self._members = [
            (inner, mpu.get_tensor_model_parallel_group() if rule.stage_norm else group)
            for inner, group in norm_groups(optimizer)
        ]
        self._groups = list(dict.fromkeys(group for _, group in self._members))
        members = [tuple(dist.get_process_group_ranks(group)) for group in (*self._groups, None)]
        *self._norm_groups, self._everyone = make_groups(
            [GroupKey(f"update of chunk {index}, part {part}", ranks) for part, ranks in enumerate(members)], timeout
        )
        self._in_flight: dict[int, Reduction] = {}
        self._results: dict[int, HostValues] = {}
        self._late: dict[int, tuple[dist.Work, torch.Tensor]] = {}

    def start(self, batch: int, tokens: torch.Tensor | None, shared: Sequence[float]) -> None:
        """Start the reductions of `batch`, whose gradients are complete.

        Args:
            batch: number of the batch.
            tokens: number of tokens in this rank's share of the batch, where it is known: on the last stage.
            shared: numbers to be summed over all ranks on the way, the same count on every rank.
        """
        self._in_flight[batch] = Reduction(self._reduce(batch, tokens, shared))

    def poll(self) -> None:
        """Launch the next collective of each batch whose last one is complete, batch by batch."""
        poll_in_order(self._in_flight.values())

    def wait(self, batch: int) -> None:
        """Wait for the reductions of `batch`; in steady state they are done by now."""
        self._in_flight.pop(batch).finish()

    def apply(self, batch: int) -> UpdateReport:
        """Clip, step and publish the next weight version, after `wait`."""
        values = self._results.pop(batch).read()
        squares, sums = values[: len(self._groups)], values[len(self._groups) :] or self._late_sums(batch)
        tokens, shared = sums[0] if sums else 0.0, sums[1:]
        scale = 1.0 / max(tokens, 1.0) if self._rule.per_token else 1.0
        grad_norm = math.sqrt(sum(squares)) * scale if all(map(math.isfinite, squares)) else math.nan
        skipped = not math.isfinite(grad_norm)
        logits = None if self._logits is None else self._logits.take(batch)
        self._weights.open_next()
        if skipped:
            self._routers.forget(batch)
        else:
            factor = scale * clip_factor(grad_norm, self._rule.clip_grad)
            self._step(StepContext(batch, factor, self._corrected(batch), logits))
        self._weights.publish_next(batch + 1)
        self._gradients.clear(batch)
        return UpdateReport(self._index, batch, grad_norm, skipped, tuple(shared), logits)

    def _late_sums(self, batch: int) -> list[float]:
        """The sums of `lag` updates ago, to which every rank has contributed by now."""
        work, sums = self._late.pop(batch - self._rule.lag, (None, None))
        if work is None or sums is None:
            return []
        work.wait()
        return HostValues(sums).read()

    @torch.no_grad()
    def _step(self, context: StepContext) -> None:
        with self._gradients.reading(context.batch):
            self._optimizer.prepare_grads()
            # Graphs in flight were recorded with other storage behind these parameters; an in-place step on them is
            # no change to what those graphs saved, so it must not count as one.
            with _unsafe_preserve_version_counter(self._model_params):
                self._master_step(context)
                publish_weights(self._optimizer)
            self._optimizer.zero_grad()
        self._routers.apply(context.batch)

    @torch.no_grad()
    def _reduce(self, batch: int, tokens: torch.Tensor | None, shared: Sequence[float]) -> Steps:
        with self._gradients.reading(batch):
            reduce_over_tensor_parallel(self._chunk)
        yield [
            self._routers.reduce(batch),
            self._logits.reduce(batch) if self._logits is not None else None,
            *(work for flat in self._gradients.flat(batch) for work in self._reduce_buffer(flat)),
        ]
        if self._tied_embedding is not None:
            yield [self._reduce_tied_embedding(batch)]
        squares = self._local_squares(batch)
        own = to_device([0.0, *shared], device())
        if tokens is not None and mpu.get_tensor_model_parallel_rank() == 0:
            own[0] = tokens
        parts = [*zip(self._norm_groups, squares, strict=True)]
        if self._rule.lag:
            self._late[batch] = dist.all_reduce(own, group=self._everyone, async_op=True), own
        else:
            parts.append((self._everyone, own))
        works, sums = _sum(parts)
        yield works
        self._results[batch] = HostValues(torch.cat(sums))

    @staticmethod
    def _reduce_buffer(flat: FlatGradients) -> list[dist.Work | None]:
        buffer = flat.buffer
        group, ranks = buffer.data_parallel_group, buffer.data_parallel_world_size
        # With --ddp-average-in-collective Megatron leaves the division to an average, which gloo does not have.
        scale = buffer.gradient_scaling_factor / (ranks if buffer.ddp_config.average_in_collective else 1)
        if scale != 1.0:
            flat.data.mul_(scale)
        if ranks == 1:
            return []
        if not buffer.ddp_config.use_distributed_optimizer:
            return [dist.all_reduce(flat.data, group=group, async_op=True)]
        return [
            dist.reduce_scatter_tensor(bucket.chunk(ranks)[group.rank()], bucket, group=group, async_op=True)
            for bucket in flat.buckets
        ]

    def _reduce_tied_embedding(self, batch: int) -> dist.Work | None:
        """The embedding on the first stage and the head on the last one are one weight: sum their gradients."""
        with self._gradients.reading(batch):
            gradient = self._tied_embedding.main_grad  # type: ignore[union-attr]
        return dist.all_reduce(gradient, group=mpu.get_embedding_group(), async_op=True)

    def _local_squares(self, batch: int) -> list[torch.Tensor]:
        """Sum of squares of this rank's gradients, a float64 tensor of one element for each norm group."""
        parts: dict[dist.ProcessGroup | None, list[torch.Tensor]] = defaultdict(list)
        with self._gradients.reading(batch):
            self._optimizer.prepare_grads()
            for inner, group in self._members:
                parts[group] += inner.get_grads_for_grad_norm()
            squares = [_sum_of_squares(parts[group]) for group in self._groups]
            # A parameter's .grad must be empty while backward passes run: autograd would add to it in place.
            self._optimizer.zero_grad()
        return squares


def _sum(parts: Sequence[tuple[dist.ProcessGroup, torch.Tensor]]) -> tuple[list[dist.Work], list[torch.Tensor]]:
    """Start one sum for each group, since small ones cost the same as large ones.

    Returns:
        The handles, and for each part a 1-D tensor that will hold its sum over its group.
    """
    works, sums = [], [part for _, part in parts]
    for group in dict.fromkeys(group for group, _ in parts):
        places = [place for place, (other, _) in enumerate(parts) if other is group]
        together = torch.cat([sums[place] for place in places])
        works.append(dist.all_reduce(together, group=group, async_op=True))
        for place, total in zip(places, together.split([len(sums[place]) for place in places]), strict=True):
            sums[place] = total
    return works, sums


def _sum_of_squares(gradients: list[torch.Tensor]) -> torch.Tensor:
    if not gradients:
        return torch.zeros(1, dtype=torch.float64, device=device())
    return torch.stack(list(torch._foreach_norm(gradients))).double().square().sum().view(1)
