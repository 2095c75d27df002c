# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The delay oracle's steps: synchronous batches whose gradients are taken at older weights."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.utils import unwrap_model

from megatron_async.mcore.optimizer import inner_optimizers
from megatron_async.mcore.rng import fork_rng
from megatron_async.optim.step import clip_factor, step
from megatron_async.pipeline.steps import History, Training
from megatron_async.pipeline.synchronous import Losses, SynchronousSteps
from megatron_async.reference import delay
from megatron_async.reference.ablations import DelayedFirstMomentStep
from megatron_async.reference.delay import DelayOracle
from megatron_async.reference.staleness import Gradients, Replay, staleness

ReportStaleness = Callable[[int, Mapping[str, float]], None]
"""Receives the number of a batch and how stale its update is."""


class OracleSteps(SynchronousSteps):
    """Runs batch by batch with an emulated delay, in one process.

    Args:
        training: model, optimizer, data.
        oracle: holds the older weights.
        first_moment: the ablation that delays Adam's first moment alone; None for none.
        report_staleness: receives, every `--log-update-statistics` batches, how stale an update is.
    """

    def __init__(
        self,
        training: Training,
        oracle: DelayOracle,
        *,
        first_moment: DelayedFirstMomentStep | None,
        report_staleness: ReportStaleness,
    ) -> None:
        super().__init__(training, first_moment or step)
        self._oracle, self._first_moment, self._report_staleness = oracle, first_moment, report_staleness
        self._replays = [Replay(iterator) for iterator in training.data_iterators]
        self.iterators = list(self._replays)
        self._groups = oracle.norm_groups(self.optimizer)

    @property
    def histories(self) -> Sequence[History]:
        return [self._oracle]

    def gradients(self, batch: int) -> Losses:
        if self.training.phases.synchronous(batch):
            losses = super().gradients(batch)
            self._forget_replays()
            if self._first_moment:
                self._first_moment.fresh = {}
            return losses
        measures = self._measures(batch)
        newest = self._at_newest_weights(batch) if measures or self._first_moment else {}
        self.clear_gradients()
        with self._oracle.stale():
            losses = self.forward_and_backward(batch)
        self._forget_replays()
        if measures:
            stale = clipped(self.optimizer, self.training.args.clip_grad)
            self._report_staleness(batch, staleness(self.optimizer, stale, newest))
        if self._first_moment:
            self._first_moment.fresh = newest
        return losses

    def update(self, batch: int, logits: torch.Tensor | None) -> tuple[list[bool], float]:
        if self._groups is None:
            result = super().update(batch, logits)
        else:
            result = self._update_by_group(batch, logits, self._groups)
        if self.training.phases.synchronous(batch):
            self._oracle.restart()
        else:
            self._oracle.record()
        return result

    def router_biases(self) -> list[list[torch.Tensor]]:
        return self._oracle.biases()

    def _update_by_group(
        self, batch: int, logits: torch.Tensor | None, groups: Sequence[Sequence[torch.Tensor]]
    ) -> tuple[list[bool], float]:
        """Clip, or skip, each group by its own norm; a parameter without a gradient is not stepped."""
        self.optimizer.prepare_grads()
        norms = []
        for params in groups:
            gradients = [param.grad for param in params if param.grad is not None]
            norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
            if not math.isfinite(norm):
                for param in params:
                    param.grad = None
            elif gradients and (factor := clip_factor(norm, self.training.args.clip_grad)) != 1.0:
                torch._foreach_mul_(gradients, factor)
            norms.append(norm)
        self.step(batch, 1.0, logits)
        skipped = [not math.isfinite(norm) for norm in norms]
        return skipped, math.nan if any(skipped) else math.hypot(*norms)

    def _measures(self, batch: int) -> bool:
        return self.training.statistics is not None and self.training.statistics.measures(batch)

    def _at_newest_weights(self, batch: int) -> Gradients:
        """Clipped gradients of a batch at the newest weights; the batch is read again afterwards."""
        self.clear_gradients()
        with fork_rng():
            self.forward_and_backward(batch)
        gradients = clipped(self.optimizer, self.training.args.clip_grad)
        for replay in self._replays:
            replay.rewind()
        if self.logits is not None:
            self.logits.forget(batch)
        return gradients

    def _forget_replays(self) -> None:
        for replay in self._replays:
            replay.forget()


def make_steps(training: Training, report_staleness: ReportStaleness) -> OracleSteps:
    """The steps of `--gradient-delay`."""
    args = training.args
    (model,) = unwrap_model(training.model)
    return OracleSteps(
        training,
        delay.make(args.gradient_delay, model, args.num_layers, undelayed_head=args.undelayed_head),
        first_moment=DelayedFirstMomentStep() if args.delay_first_moment_only else None,
        report_staleness=report_staleness,
    )


@torch.no_grad()
def clipped(optimizer: MegatronOptimizer, limit: float) -> Gradients:
    """Copies of the gradients that an optimizer would step with, clipped by their global norm."""
    optimizer.prepare_grads()
    factor = clip_factor(float(optimizer.get_grad_norm()), limit)
    gradients = {
        param: param.grad * factor
        for inner in inner_optimizers(optimizer)
        for group in inner.optimizer.param_groups
        for param in group["params"]
        if param.grad is not None
    }
    optimizer.zero_grad()
    return gradients
