# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The step loop: segments of batches between known drains, with evaluation, checkpoints and logging in between."""

import argparse
import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.core.utils import get_model_config, unwrap_model

from megatron_async.checkpoint.state import largest
from megatron_async.checkpoint.store import Checkpoints
from megatron_async.mcore.optimizer import inner_optimizers, publish_weights, scheduler_for
from megatron_async.mcore.parallel import device, undisturbed_random_states
from megatron_async.mcore.training import evaluate as megatron_evaluate
from megatron_async.optim import corrections, registry
from megatron_async.optim.qk_clip import watches_logits
from megatron_async.optim.statistics import UpdateStatistics
from megatron_async.pipeline.executor import Hooks
from megatron_async.pipeline.timeline import Timeline
from megatron_async.pipeline.update import UpdateReport
from megatron_async.reference import delay as oracle
from megatron_async.reference.ablations import DelayedFirstMoment
from megatron_async.schedules import is_delayed
from megatron_async.training import expert_balance
from megatron_async.training.faults import SkippedUpdates
from megatron_async.training.metrics import BatchNumbers, KnownValues, Metrics, PendingLargestLogit, PendingLoss
from megatron_async.training.phases import Phases
from megatron_async.training.signals import ENDED_UNSAVED, FINISHED, SAVED_ON_REQUEST, StopRequests
from megatron_async.training.steps import DelayedSteps, MegatronSteps, Steps, Training


@dataclass(slots=True)
class _Clock:
    """When batches were completed on this rank, evaluation and other pauses left out."""

    last: float = field(default_factory=time.perf_counter)
    completed: dict[int, float] = field(default_factory=dict)

    def resume(self) -> None:
        self.last = time.perf_counter()

    def complete(self, batch: int) -> float:
        """Note that a batch is complete; return seconds since the one before."""
        now = time.perf_counter()
        elapsed, self.last = now - self.last, now
        self.completed[batch] = elapsed
        return elapsed


class Loop:
    """Trains from `args.iteration` to `args.train_iters`.

    Args:
        args: Megatron's arguments and ours.
        model, optimizer, scheduler: as Megatron's `setup_model_and_optimizer` returns them.
        forward_step: Megatron's forward step function.
        train_data, valid_data: iterators over micro-batches, None on ranks without data.
        checkpoints: where the run has been loaded from and is saved to.
        stops: requests to end early.
        metrics: where results go.
    """

    def __init__(
        self,
        *,
        args: argparse.Namespace,
        model: list[Any],
        optimizer: MegatronOptimizer,
        scheduler: Any,
        forward_step: Any,
        train_data: Any,
        valid_data: Any,
        checkpoints: Checkpoints,
        stops: StopRequests,
        metrics: Metrics,
    ) -> None:
        self._args, self.model, self._optimizer, self._scheduler = args, model, optimizer, scheduler
        self._forward_step, self._valid_data, self.metrics = forward_step, valid_data, metrics
        self.train_data = train_data
        self.checkpoints, self._stops = checkpoints, stops
        self._stopping = False
        self._skips = SkippedUpdates(args.max_consecutive_skips, args.global_batch_size)
        self._config = get_model_config(model[0])
        self._phases = Phases(args.sync_start_iters, args.train_iters - args.sync_cooldown_iters)
        # In the order of their hooks around a step.
        self._first_moments = _first_moments(args, optimizer)
        self._statistics = _statistics(args, model, optimizer)
        self._correction = corrections.make(args.staleness_correction, args.correction_strength, optimizer)
        if self._statistics is not None:
            self._statistics.close()
        self._balance = expert_balance.make(self._config, model)
        self._data_parallel_group = mpu.get_data_parallel_group(with_context_parallel=True)
        self._world = dist.get_world_size()
        self._logit_group = dist.new_group() if watches_logits(args) and self._world > 1 else None
        self._optimizers = _by_chunk(args, optimizer)
        self._schedulers = [scheduler_for(scheduler, chunk) for chunk in self._optimizers]
        for own, steps in zip(self._schedulers, checkpoints.scheduler_steps, strict=False):
            own.step(increment=steps - own.num_steps)
        self._reports: dict[int, list[UpdateReport]] = {}
        self._learning_rates: dict[int, float] = {}
        self._clock = _Clock()
        self._last_of_segment = -1
        self.timeline = Timeline(args.trace_batches if args.trace_file else 0)
        self._config.grad_scale_func = optimizer.scale_loss
        self._config.finalize_model_grads_func = finalize_model_grads
        self._steps = self._make_steps(train_data)
        checkpoints.restore(self._steps.histories)

    def run(self) -> int:
        """Train to the end; evaluate and save on the way as Megatron's intervals say.

        Returns:
            The exit status: finished, or stopped on request.

        Raises:
            TooManySkips: updates were skipped again and again.
            JointError: a checkpoint could not be saved.
        """
        args = self._args
        for chunk in self.model:
            chunk.train()
        batch = evaluated = args.iteration  # a run that is resumed at its end has been evaluated there
        while batch < args.train_iters and not self._agree_to_stop():
            self._clock.resume()
            self._last_of_segment = self._next_stop(batch) - 1
            batch += self._steps.run(batch, self._last_of_segment + 1 - batch)
            args.iteration = batch
            if self._evaluates and batch % args.eval_interval == 0:
                self.evaluate(batch)
                evaluated = batch
            if args.save_interval and batch % args.save_interval == 0:
                self._save(batch)
            if args.exit_interval and batch % args.exit_interval == 0:
                break
        if self._stopping and batch < args.train_iters:
            return self._stop(batch)
        if self._evaluates and batch >= args.train_iters and evaluated != batch:
            self.evaluate(batch)
        self._save(batch)
        self.checkpoints.finish()
        self.metrics.flush(wait=True)
        return FINISHED

    def _agree_to_stop(self) -> bool:
        """Whether any rank has been asked to end. The pipe is empty, so asking all of them costs next to nothing.

        Raises:
            TooManySkips: on every rank, if one has skipped too many updates in a row.
            JointError: on every rank, if one could not write its share of a checkpoint in the background.
        """
        if self._args.async_save and largest(self.checkpoints.failed):
            self.checkpoints.finish()
        if largest(self._skips.too_many):
            self.checkpoints.finish()
            raise self._skips.error(self.checkpoints.saved)
        self._stopping = bool(largest(self._stopping or self._stops.requested))
        return self._stopping

    def _stop(self, batch: int) -> int:
        """Save after `batch` batches, because a signal or the time limit asked for it."""
        self._save(batch)
        self.checkpoints.finish()
        self.metrics.flush(wait=True)
        self.metrics.note(f"asked to end: stopped after iteration {batch} of {self._args.train_iters}")
        return SAVED_ON_REQUEST if self._args.save or batch == 0 else ENDED_UNSAVED

    def evaluate(self, iteration: int) -> None:
        """Loss of the newest weights on the validation data."""
        self.metrics.flush(wait=True)
        with self._newest_weights(), undisturbed_random_states():
            losses, _, _ = megatron_evaluate(self._forward_step, self._valid_data, self.model, None, self._config)
        self._config.timers = None  # Megatron's evaluation switches its timers on
        if losses:
            self.metrics.validation(iteration, losses["lm loss"].item())

    @contextlib.contextmanager
    def _newest_weights(self) -> Iterator[None]:
        """Inside, the model holds the weights that count, which under weight prediction are not those of training."""
        if self._correction is None:
            yield
            return
        with self._correction.newest_weights() as differ:
            if differ:
                publish_weights(self._optimizer)
            yield
        if differ:
            publish_weights(self._optimizer)

    @property
    def _evaluates(self) -> bool:
        return bool(self._args.do_valid and self._args.eval_interval and self._args.eval_iters)

    def _next_stop(self, batch: int) -> int:
        """The first batch that must not have started when `batch` .. are done: a known drain."""
        args = self._args
        intervals = [
            args.eval_interval if self._evaluates else None,
            args.save_interval if args.save else None,
            args.exit_interval,
        ]
        return min([args.train_iters, *((batch // interval + 1) * interval for interval in intervals if interval)])

    def _make_steps(self, train_data: Any) -> Steps:
        args = self._args
        training = Training(
            args=args,
            model=self.model,
            optimizers=self._optimizers,
            forward_step=self._forward_step,
            data_iterators=train_data if isinstance(train_data, list) else [train_data],
            phases=self._phases,
            hooks=Hooks(
                losses=self._losses,
                before_update=self._before_update,
                shared=self._shared,
                updated=self._updated,
                computes=self._computes,
            ),
            timeline=self.timeline,
        )
        if args.pipeline_schedule != "1f1b":
            return DelayedSteps(training, newest_version=args.iteration)
        if args.gradient_delay is None:
            return MegatronSteps(training, None)
        (model,) = unwrap_model(self.model)
        delayed = oracle.make(args.gradient_delay, model, args.num_layers, undelayed_head=args.undelayed_head)
        return MegatronSteps(
            training, delayed, self._first_moments, correction=self._correction, staleness=self._staleness
        )

    def _losses(self, batch: int, losses: Sequence[dict[str, torch.Tensor]]) -> None:
        self.metrics.loss(batch + 1, PendingLoss([part["lm loss"] for part in losses], self._data_parallel_group))

    def _computes(self, batch: int) -> None:
        if self._balance is not None:
            self._balance.use(batch)

    def _staleness(self, batch: int, values: Mapping[str, float]) -> None:
        self.metrics.extra(batch + 1, KnownValues(values))

    def _before_update(self, chunk: int, batch: int) -> None:
        if self._statistics is not None:
            self._statistics.active = (batch + 1) % self._args.log_update_statistics == 0
        if self._correction is not None:
            self._correction.active = is_delayed(self._args) and self._phases.corrected(batch)

    def _shared(self, chunk: int, batch: int) -> tuple[float, ...]:
        """The share of the batch's time that this rank computed, and whether it wants to end; once for a batch."""
        if chunk != 0:
            return 0.0, 0.0
        elapsed = self._clock.complete(batch)
        wants_to_end = self._stops.requested or self._skips.too_many or self.checkpoints.failed
        return min(1.0, self.timeline.busy_since_last() / elapsed), float(wants_to_end)

    def _updated(self, report: UpdateReport) -> int | None:
        args, batch = self._args, report.batch
        self._learning_rates[batch] = self._learning_rate(report.chunk)
        if not report.skipped:
            self._schedulers[report.chunk].step(increment=args.global_batch_size)
        reports = self._reports.setdefault(batch, [])
        reports.append(report)
        if len(reports) == len(self._optimizers):
            self._complete(self._reports.pop(batch))
        if not report.shared or report.shared[1] == 0:
            return None
        # So many batches may have begun on some stage when this one is updated: the earliest that all can stop after.
        return batch + max(2, self._args.pipeline_model_parallel_size - 1)

    def _complete(self, reports: Sequence[UpdateReport]) -> None:
        """Every chunk of this rank has had its update of a batch."""
        batch = reports[0].batch
        if self._statistics is not None and (batch + 1) % self._args.log_update_statistics == 0:
            self._statistics.active = False
            self.metrics.extra(batch + 1, self._statistics.reduce())
        if self._balance is not None:
            self.metrics.extra(batch + 1, self._balance.reduce(batch))
        if logits := [report.logits for report in reports if report.logits is not None]:
            self.metrics.extra(batch + 1, PendingLargestLogit(logits, self._logit_group))
        self._args.consumed_train_samples += self._args.global_batch_size
        elapsed = self._clock.completed.pop(batch)
        skipped = any(report.skipped for report in reports)
        busy = sum(report.shared[0] for report in reports) if reports[0].shared else None
        if batch == self._last_of_segment:
            elapsed += time.perf_counter() - self._clock.last  # the drain belongs to the segment's last batch
        self.metrics.batch(
            BatchNumbers(
                iteration=batch + 1,
                grad_norm=math.hypot(*(report.grad_norm for report in reports)),
                learning_rate=self._learning_rates.pop(batch),
                skipped=skipped,
                elapsed=elapsed,
                bubble_share=None if busy is None else 1.0 - busy / self._world,
            )
        )
        if skipped:
            self.metrics.note(self._skips.skipped(batch))
        else:
            self._skips.applied()

    def _learning_rate(self, chunk: int) -> float:
        rate = get_canonical_lr_for_logging(self._optimizers[chunk].param_groups)
        return 0.0 if rate is None else float(rate)

    def _save(self, iteration: int) -> None:
        """Save if there is a folder for it and something that is not in it yet."""
        if not self._args.save or iteration in (0, self.checkpoints.saved, self.checkpoints.pending):
            return
        self.metrics.flush(wait=True)
        self._scheduler.num_steps = self._schedulers[0].num_steps
        self._args.scheduler_steps = [scheduler.num_steps for scheduler in self._schedulers]
        self.checkpoints.save(iteration, self._steps.histories)


def _first_moments(args: argparse.Namespace, optimizer: MegatronOptimizer) -> list[DelayedFirstMoment]:
    if not args.delay_first_moment_only:
        return []
    return [DelayedFirstMoment(inner.optimizer) for inner in inner_optimizers(optimizer)]


def _statistics(
    args: argparse.Namespace, model: Sequence[Any], optimizer: MegatronOptimizer
) -> UpdateStatistics | None:
    """Statistics of updates, where they are asked for. Collective."""
    if not args.log_update_statistics:
        return None
    return UpdateStatistics(
        (inner.optimizer for inner in inner_optimizers(optimizer)),
        registry.roles_of_masters(model, optimizer),
        dist.new_group() if dist.get_world_size() > 1 else None,
        device(),
    )


def _by_chunk(args: argparse.Namespace, optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers that are stepped separately: one for each chunk under WPipe, else one for all."""
    return list(optimizer.chained_optimizers) if args.pipeline_schedule == "wpipe" else [optimizer]
