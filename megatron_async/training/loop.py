# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The training loop: segments of batches, with evaluations and checkpoints in between.

A segment ends where the pipeline must drain: before an evaluation, a save, the end of the run, or a change between
synchronous and delayed batches.
"""

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.num_microbatches_calculator import get_current_global_batch_size, update_num_microbatches
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.core.utils import get_model_config

from megatron_async.checkpoint.agreement import JointError
from megatron_async.checkpoint.state import largest
from megatron_async.checkpoint.store import Checkpoints
from megatron_async.data.iterators import EvaluationSet, RunData
from megatron_async.mcore.batch_sizes import BatchSizes
from megatron_async.mcore.optimizer import publish_weights, scheduler_for
from megatron_async.optim.corrections import Correction
from megatron_async.optim.statistics import UpdateStatistics
from megatron_async.optim.totals import GradientZeros
from megatron_async.pipeline.executor import Hooks
from megatron_async.pipeline.steps import Steps, Training
from megatron_async.pipeline.timeline import Timeline
from megatron_async.pipeline.update import UpdateReport
from megatron_async.schedules.phases import Phases
from megatron_async.training.callbacks import Callback, CompletedBatch
from megatron_async.training.evaluation import GivenUp, mean_loss
from megatron_async.training.faults import TrainingFault
from megatron_async.training.signals import ENDED_UNSAVED, FINISHED, SAVED_ON_REQUEST


@dataclass(frozen=True, slots=True)
class Trained:
    """Model and optimizer of a run; see also `Training`.

    Attributes:
        optimizer: Megatron's optimizer of all chunks.
        scheduler: Megatron's learning-rate scheduler.
        optimizers: those that step separately: one for each chunk, or one for all chunks.
    """

    model: list[Any]
    optimizer: MegatronOptimizer
    scheduler: Any
    optimizers: list[MegatronOptimizer]
    correction: Correction | None
    statistics: UpdateStatistics | None
    zeros: GradientZeros | None


class Loop:
    """Trains from `args.iteration` to `args.train_iters`.

    Args:
        make_steps: chooses how batches are run.
        forward_step: Megatron's forward step function.
        callbacks: called in this order.
    """

    def __init__(
        self,
        *,
        args: argparse.Namespace,
        trained: Trained,
        make_steps: Callable[[Training], Steps],
        forward_step: Any,
        data: RunData,
        checkpoints: Checkpoints,
        callbacks: Sequence[Callback],
    ) -> None:
        self.args, self.trained, self.forward_step = args, trained, forward_step
        self.model, self.optimizer = trained.model, trained.optimizer
        self.checkpoints, self.callbacks = checkpoints, tuple(callbacks)
        self.data, self._sizes = data, BatchSizes.of(args)
        self.timeline = Timeline(args.trace_batches if args.trace_file else 0)
        self._config = get_model_config(trained.model[0])
        self._config.grad_scale_func = trained.optimizer.scale_loss
        self._config.finalize_model_grads_func = finalize_model_grads
        self._schedulers = [scheduler_for(trained.scheduler, chunk) for chunk in trained.optimizers]
        for own, steps in zip(self._schedulers, checkpoints.scheduler_steps, strict=False):
            own.step(increment=steps - own.num_steps)
        self._reports: dict[int, list[UpdateReport]] = {}
        self._learning_rates: dict[int, float] = {}
        self._seconds: dict[int, float] = {}
        self._clock, self._last_of_segment, self._stopping = time.perf_counter(), -1, False
        self.steps = make_steps(self._training())
        checkpoints.restore(self.steps.histories)

    def _training(self) -> Training:
        args, trained = self.args, self.trained
        return Training(
            args=args,
            model=trained.model,
            optimizers=trained.optimizers,
            forward_step=self.forward_step,
            data_iterators=self.data.train,
            phases=Phases(args.sync_start_iters, args.train_iters - args.sync_cooldown_iters),
            correction=trained.correction,
            statistics=trained.statistics,
            zeros=trained.zeros,
            hooks=Hooks(
                losses=partial(self._notify, Callback.on_losses),
                action=partial(self._notify, Callback.on_action),
                shared=self._shared,
                updated=self._updated,
                acted=partial(self._notify, Callback.on_action_end),
            ),
            timeline=self.timeline,
        )

    def run(self) -> int:
        """Train to the end; evaluate and save at Megatron's intervals.

        Returns:
            The exit status, see `signals`.

        Raises:
            TrainingFault: the first loss is not finite, or too many updates in a row were skipped.
            JointError: a checkpoint could not be saved.
        """
        self._notify(Callback.on_train_begin, self)
        together = True  # whether all ranks end here
        with contextlib.closing(self.checkpoints):
            try:
                return self._train()
            except TrainingFault:
                self.checkpoints.finish()  # the process ends, and with it the thread that writes
                raise
            except JointError:
                raise
            except BaseException:
                together = False
                raise
            finally:
                self.end(complete=together)

    def end(self, *, complete: bool = True) -> None:
        """Call `Callback.on_train_end`."""
        self._notify(Callback.on_train_end, complete)

    def note(self, text: str) -> None:
        """Write a message to the log."""
        self._notify(Callback.on_note, text)

    def _notify(self, event: Callable[..., None], *values: Any) -> None:
        """Call a method of every callback, given as `Callback.on_...`."""
        for callback in self.callbacks:
            getattr(callback, event.__name__)(*values)

    def _train(self) -> int:
        args = self.args
        for chunk in self.model:
            chunk.train()
        batch = evaluated = args.iteration  # a run resumed at its end was evaluated there
        while batch < args.train_iters and not self._agree_to_stop():
            update_num_microbatches(args.consumed_train_samples)
            if batch + 1 in args.iterations_to_skip:
                self._skip(batch)
                batch += 1
            else:
                self._clock = time.perf_counter()
                self._last_of_segment = self._next_stop(batch) - 1
                batch += self.steps.run(batch, self._last_of_segment + 1 - batch)
            args.iteration = batch
            self._notify(Callback.on_drain)
            if self._evaluates_at(batch):
                self.evaluate(batch)
                evaluated = batch
            if args.save_interval and batch % args.save_interval == 0:
                self._save(batch)
            if args.exit_interval and batch % args.exit_interval == 0:
                break
        stopped = self._stopping and batch < args.train_iters
        finished = not stopped and batch >= args.train_iters
        if finished and self._evaluates and evaluated != batch:
            self.evaluate(batch)
        self._save(batch)
        self.checkpoints.finish()
        if finished and self.data.test:
            self._losses(batch, self.data.test)
        if not stopped:
            return FINISHED
        self.note(f"asked to end: stopped after iteration {batch} of {args.train_iters}")
        return SAVED_ON_REQUEST if args.save or batch == 0 else ENDED_UNSAVED

    def _skip(self, batch: int) -> None:
        """Pass over a batch: data and counters go on; weights, optimizer and learning rate stay."""
        self.steps.skip(batch)
        size = get_current_global_batch_size()
        self.args.consumed_train_samples += size
        self.args.skipped_train_samples += size
        self.note(f"iteration {batch + 1}: skipped (--iterations-to-skip); samples {self._sizes.samples(batch)}")

    def _agree_to_stop(self) -> bool:
        """Whether any rank wants to stop. Collective, with an empty pipeline.

        Raises:
            JointError: on every rank, if one could not write its part of a checkpoint in the background.
        """
        if self.args.async_save and largest(self.checkpoints.failed):
            self.checkpoints.finish()
        self._stopping = bool(largest(self._stopping or self._wants_stop()))
        return self._stopping

    def _wants_stop(self) -> bool:
        return self.checkpoints.failed or any(callback.wants_stop for callback in self.callbacks)

    def evaluate(self, iteration: int) -> None:
        """Compute the losses of the validation sets with the newest weights."""
        self._notify(Callback.on_evaluation_begin, iteration)
        losses = self._losses(iteration, self.data.valid)
        if losses:
            self.args.consumed_valid_samples += self.args.eval_iters * self.args.eval_global_batch_size
        self._notify(Callback.on_evaluation_end, iteration, losses[0] if losses else None)

    def _losses(self, iteration: int, parts: Sequence[EvaluationSet]) -> list[float | None]:
        """The loss of each set; none of them if the evaluation was given up."""
        losses = []
        try:
            with self._newest_weights():
                for part in parts:
                    losses.append(mean_loss(self.args, self.model, self.forward_step, part, self._wants_stop))
                    self._notify(Callback.on_evaluated, iteration, part.name, losses[-1])
        except GivenUp:
            self.note(f"asked to end: the evaluation at iteration {iteration} was given up")
            return []
        return losses

    @contextlib.contextmanager
    def _newest_weights(self) -> Iterator[None]:
        """Use the weights to be evaluated; weight prediction trains with other ones."""
        correction = self.trained.correction
        with correction.newest_weights() if correction else contextlib.nullcontext(False) as differ:
            if differ:
                publish_weights(self.optimizer, gather_now=True)
            yield
        if differ:
            publish_weights(self.optimizer, gather_now=True)

    @property
    def _evaluates(self) -> bool:
        return bool(self.data.valid and self.args.eval_interval)

    def _evaluates_at(self, batch: int) -> bool:
        return self._evaluates and batch % self.args.eval_interval == 0 and batch >= (self.args.start_eval_at_iter or 0)

    def _next_stop(self, batch: int) -> int:
        """The next batch number after `batch` at which the pipeline must be empty."""
        args = self.args
        evaluation = args.eval_interval if self._evaluates else None
        saves, hashes = args.save_interval if args.save else None, args.check_weight_hash_across_dp_replicas_interval
        intervals = evaluation, saves, hashes, args.exit_interval
        stops = [args.train_iters, *((batch // interval + 1) * interval for interval in intervals if interval)]
        fixed = [number - 1 for number in args.iterations_to_skip]
        fixed += [args.profile_step_start, args.profile_step_end] if args.profile else []
        stops += (number for number in fixed if number > batch)
        if (batches := self._sizes.batches_to_change(args.consumed_train_samples)) is not None:
            stops.append(batch + batches)
        return min(stops)

    def _shared(self, chunk: int, batch: int) -> tuple[float, ...]:
        """Busy share of the batch and request to stop, summed over all ranks; once per batch."""
        if chunk != 0:
            return 0.0, 0.0
        before, self._clock = self._clock, time.perf_counter()
        self._seconds[batch] = self._clock - before
        return min(1.0, self.timeline.busy_since_last() / self._seconds[batch]), float(self._wants_stop())

    def _updated(self, report: UpdateReport) -> int | None:
        """Advance the scheduler of a chunk; return the last batch to run if a rank wants to stop."""
        args, batch = self.args, report.batch
        rate = get_canonical_lr_for_logging(self.trained.optimizers[report.chunk].param_groups)
        self._learning_rates[batch] = 0.0 if rate is None else float(rate)
        if not report.skipped:
            self._schedulers[report.chunk].step(increment=get_current_global_batch_size())
        reports = self._reports.setdefault(batch, [])
        reports.append(report)
        if len(reports) == len(self.trained.optimizers):
            self._complete(self._reports.pop(batch))
        if not report.shared or report.shared[1] == 0:
            return None
        # Some stage may have started this many batches more; all ranks can stop after them. An update that is launched
        # at once is reported before the next one.
        stages = args.pipeline_model_parallel_size
        return batch + (max(3, stages) if args.update_launch == "at-once" else max(2, stages - 1))

    def _complete(self, reports: Sequence[UpdateReport]) -> None:
        """Report a batch that is complete on every chunk of this rank."""
        number = reports[0].batch
        self.args.consumed_train_samples += get_current_global_batch_size()
        seconds = self._seconds.pop(number)
        if number == self._last_of_segment:
            seconds += time.perf_counter() - self._clock  # the last batch of a segment includes the drain
        busy = sum(report.shared[0] for report in reports) if reports[0].shared else None
        batch = CompletedBatch(
            number=number,
            reports=reports,
            learning_rate=self._learning_rates.pop(number),
            seconds=seconds,
            bubble_share=None if busy is None else 1.0 - busy / dist.get_world_size(),
        )
        self._notify(Callback.on_batch_end, batch)

    def _save(self, iteration: int) -> None:
        """Save unless there is no folder or it already holds this iteration."""
        if not self.args.save or iteration in (0, self.checkpoints.saved, self.checkpoints.pending):
            return
        self._notify(Callback.on_save_begin, iteration)
        self.trained.scheduler.num_steps = self._schedulers[0].num_steps
        self.args.scheduler_steps = [scheduler.num_steps for scheduler in self._schedulers]
        self.checkpoints.save(iteration, self.steps.histories)
        self._notify(Callback.on_save_end, iteration)
