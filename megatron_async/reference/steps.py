# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Training steps of the delay oracle: synchronous batches with gradients at older weights.

Fresh gradients, for comparison and for the ablation of the first moment, are those that a synchronous step would take
now: at the newest weights, of the batch that many ahead as the delay is long (arXiv 2606.30634, A.8). They are computed
beforehand and again when their batch is due.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.utils import unwrap_model

from megatron_async.mcore.parallel import device
from megatron_async.mcore.rng import fork_rng
from megatron_async.optim.step import clip_factor, step
from megatron_async.optim.totals import shares
from megatron_async.pipeline.steps import History, Training
from megatron_async.pipeline.synchronous import Losses, SynchronousSteps
from megatron_async.reference import delay
from megatron_async.reference.ablations import DelayedFirstMomentStep
from megatron_async.reference.staleness import clipped_gradients, staleness

ReportStaleness = Callable[[int, Mapping[str, float]], None]


class OracleSteps(SynchronousSteps):
    """Runs batch by batch with the delay oracle, on one pipeline stage.

    Args:
        training: model, optimizer, data.
        oracle: holds the older weights.
        first_moment: ablation that delays Adam's first moment only, or None.
        report_staleness: receives a batch and the staleness of its update every `--log-update-statistics` batches.
    """

    def __init__(
        self,
        training: Training,
        oracle: delay.DelayOracle,
        *,
        first_moment: DelayedFirstMomentStep | None,
        report_staleness: ReportStaleness,
    ) -> None:
        super().__init__(training, first_moment or step)
        self._oracle, self._first_moment, self._report_staleness = oracle, first_moment, report_staleness
        self._groups, self._shares = oracle.norm_groups(self.optimizer), shares(self.optimizer)
        self._read: deque[list[Any]] = deque()  # batches that were read and are not computed yet

    @property
    def histories(self) -> Sequence[History]:
        return [self._oracle]

    def skip(self, batch: int) -> None:
        super().skip(batch)
        self._oracle.record(restart=self.training.phases.synchronous(batch))

    def gradients(self, batch: int) -> Losses:
        training, limit = self.training, self.training.args.clip_grad
        synchronous = training.phases.synchronous(batch)
        measures = not synchronous and training.statistics is not None and training.statistics.measures(batch)
        fresh = {}
        if measures or (self._first_moment and not synchronous):
            with fork_rng():
                self._compute(batch, self._ahead(self._oracle.depth))
            if self.logits is not None:
                self.logits.forget(batch)
            fresh = clipped_gradients(self.optimizer, limit)
        with nullcontext() if synchronous else self._oracle.stale():
            losses = self._compute(batch, self._ahead(0))
        self._read.popleft()
        if measures:
            stale = clipped_gradients(self.optimizer, limit)
            self._report_staleness(batch, staleness(self.optimizer, stale, fresh))
        if self._first_moment:
            self._first_moment.fresh = fresh
        return losses

    def _ahead(self, distance: int) -> list[Any]:
        """The micro-batches of the batch at this distance from the present one, or of the last one of the data."""
        count = get_num_microbatches()
        while len(self._read) <= distance:
            data = [None if source is None else list(islice(source, count)) for source in self.training.data_iterators]
            if any(microbatches is not None and len(microbatches) < count for microbatches in data):
                break
            self._read.append(data)
        return self._read[min(distance, len(self._read) - 1)]

    def _compute(self, batch: int, data: Sequence[list[Any] | None]) -> Losses:
        """Compute the gradients of a batch with the weights in use."""
        self.iterators = [None if microbatches is None else iter(microbatches) for microbatches in data]
        return super().gradients(batch)

    def update(self, batch: int, logits: torch.Tensor | None) -> tuple[list[bool], float]:
        result = self._update_by_group(batch, logits) if self._groups else super().update(batch, logits)
        self._oracle.record(restart=self.training.phases.synchronous(batch))
        return result

    def prepare_gradients(self, batch: int) -> bool:
        overflow = super().prepare_gradients(batch)
        if (correction := self.training.correction) is not None:
            correction.before_norm(self.training.corrected(batch))
        return overflow

    def router_biases(self) -> list[list[torch.Tensor]]:
        return self._oracle.biases()

    def _update_by_group(self, batch: int, logits: torch.Tensor | None) -> tuple[list[bool], float]:
        """Clip each group by its own norm and skip groups whose norm is not finite."""
        self.prepare_gradients(batch)
        norms = self._norms()
        for params, norm in zip(self._groups, norms, strict=True):
            gradients = [param.grad for param in params if param.grad is not None]
            if not math.isfinite(norm):
                for param in params:
                    param.grad = None  # not stepped
            elif gradients and (factor := clip_factor(norm, self.training.args.clip_grad)) != 1.0:
                torch._foreach_mul_(gradients, factor)
        self.step(batch, 1.0, logits)
        skipped = [not math.isfinite(norm) for norm in norms]
        return skipped, math.nan if any(skipped) else math.hypot(*norms)

    def _norms(self) -> list[float]:
        """The L2 norm of the gradients of each group, over all ranks."""
        squares = torch.zeros(len(self._groups), dtype=torch.float64, device=device())
        for index, params in enumerate(self._groups):
            for param in params:
                if param.grad is not None and param in self._shares:
                    squares[index] += self._shares[param] * param.grad.double().square().sum()
        dist.all_reduce(squares)
        return squares.sqrt().tolist()


def make_steps(training: Training, report_staleness: ReportStaleness) -> OracleSteps:
    """The training steps of `--gradient-delay`."""
    args = training.args
    (model,) = unwrap_model(training.model)
    return OracleSteps(
        training,
        delay.make(args.gradient_delay, model, args.num_layers, undelayed_head=args.undelayed_head),
        first_moment=DelayedFirstMomentStep() if args.delay_first_moment_only else None,
        report_staleness=report_staleness,
    )
