# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Interprets a schedule's actions on one stage: one short method for each kind of action.

The executor knows nothing of any particular schedule. In steady state it waits for its neighbors' activations and
gradients and for nothing else; reductions advance between actions and are due at their update.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from megatron_async import megatron
from megatron_async.pipeline.gradients import GradientGenerations
from megatron_async.pipeline.links import StageLinks
from megatron_async.pipeline.timeline import Timeline
from megatron_async.pipeline.update import DeferredUpdate, UpdateReport
from megatron_async.pipeline.weights import WeightVersions
from megatron_async.schedules.actions import Action, Backward, Forward, Reduce, Update

Plan = Callable[[int], Iterator[Action]]
"""Number of batches -> this stage's actions for a segment of that many batches."""


@dataclass(frozen=True, slots=True)
class Compute:
    """What a stage runs for a micro-batch.

    Attributes:
        chunk: wrapped model chunk.
        forward_step: Megatron's forward step function: (data iterator, model) -> (output, loss function).
        data_iterator: micro-batches in order, or None on stages without data.
        microbatches: micro-batches per batch, M; the loss is divided by it before backward.
        context_parallel_size: for Megatron's loss scaling.
        last_stage: whether this stage computes the loss.
    """

    chunk: Any
    forward_step: Callable[..., Any]
    data_iterator: Any
    microbatches: int
    context_parallel_size: int
    last_stage: bool


@dataclass(frozen=True, slots=True)
class Hooks:
    """How the training loop takes part; none of these may wait for another rank.

    Attributes:
        losses: called on the last stage when the forwards of a batch are done, with Megatron's loss dictionaries.
        before_update: called just before the update of a batch.
        shared: numbers to be summed over all ranks with the reductions of a batch.
        updated: called after each update; may return a batch after which the segment ends early.
    """

    losses: Callable[[int, Sequence[dict[str, torch.Tensor]]], None]
    before_update: Callable[[int], None]
    shared: Callable[[int], Sequence[float]]
    updated: Callable[[UpdateReport], int | None]


class StageFailure(RuntimeError):
    """A stage could not go on; the message names the rank and its place in the schedule."""


class Executor:
    """Runs segments of a schedule on one stage; between segments the pipe is empty."""

    def __init__(
        self,
        *,
        compute: Compute,
        links: StageLinks,
        weights: WeightVersions,
        gradients: GradientGenerations,
        update: DeferredUpdate,
        hooks: Hooks,
        timeline: Timeline,
    ) -> None:
        self._compute, self._links, self._hooks, self._timeline = compute, links, hooks, timeline
        self._weights, self._gradients, self._update = weights, gradients, update
        self._config = megatron.get_model_config(compute.chunk)
        # (input, output) of forwards whose backward is still to come, in order.
        self._in_flight: deque[tuple[torch.Tensor | None, torch.Tensor]] = deque()
        self._losses: list[dict[str, torch.Tensor]] = []
        self._end = 0

    def run(self, plan: Plan, *, first_batch: int, batches: int) -> int:
        """Fill the pipe, run a segment, drain the pipe.

        Args:
            plan: actions of this stage for any number of batches; shorter plans are prefixes (see the schedule).
            first_batch: number of the segment's first batch.
            batches: number of batches, unless a hook ends the segment earlier.

        Returns:
            The number of batches that were run.
        """
        self._end = (first_batch + batches) * self._compute.microbatches
        self._links.forward.post_receive()
        self._links.backward.post_receive()
        actions, done = plan(batches), 0
        while (action := next(actions, None)) is not None:
            done += 1
            try:
                stop_after = self._perform(action)
                self._update.poll()
            except RuntimeError as error:
                raise StageFailure(self._place(action, done, first_batch)) from error
            if stop_after is not None and stop_after + 1 < first_batch + batches:
                batches = stop_after + 1 - first_batch
                self._end = (first_batch + batches) * self._compute.microbatches
                actions = islice(plan(batches), done, None)
        self._links.drain()
        assert not self._in_flight
        return batches

    def _place(self, action: Action, number: int, first_batch: int) -> str:
        """Where this rank is: for the message of a failure."""
        batch = getattr(action, "batch", None)
        if batch is None:
            batch = action.microbatch // self._compute.microbatches  # type: ignore[union-attr]
        return (
            f"rank {dist.get_rank()} failed in {action}, batch {batch}, action {number} of the segment that began with "
            f"batch {first_batch}"
        )

    def _perform(self, action: Action) -> int | None:
        match action:
            case Forward():
                self._forward(action)
            case Backward():
                self._backward(action)
            case Reduce():
                self._update.start(action.batch, self._hooks.shared(action.batch))
            case Update():
                return self._apply(action)
        return None

    def _forward(self, action: Forward) -> None:
        source = self._links.forward.receive()
        if action.microbatch + 1 < self._end:
            self._links.forward.post_receive()
        if source is not None:
            source.requires_grad_()
        self._weights.use(action.version)
        batch, position = divmod(action.microbatch, self._compute.microbatches)
        with self._timeline.span("F", batch=batch, microbatch=action.microbatch, version=action.version):
            output, _ = megatron.forward_step(
                self._compute.forward_step,
                self._compute.data_iterator,
                self._compute.chunk,
                self._compute.microbatches,
                source,
                self._losses,
                self._config,
                self._compute.context_parallel_size,
                current_microbatch=position,
                is_last_stage=self._compute.last_stage,
            )
        self._links.forward.send(output)
        # What comes back is a gradient; of the output only its place in the graph is needed from now on.
        megatron.deallocate_output_tensor(output, self._config.deallocate_pipeline_outputs)
        self._in_flight.append((source, output))
        if position == self._compute.microbatches - 1:
            losses, self._losses = self._losses, []
            if self._compute.last_stage:
                self._hooks.losses(batch, losses)

    def _backward(self, action: Backward) -> None:
        gradient = self._links.backward.receive()
        if action.microbatch + 1 < self._end:
            self._links.backward.post_receive()
        source, output = self._in_flight.popleft()
        batch = action.microbatch // self._compute.microbatches
        self._weights.use(action.version)
        self._gradients.use(batch)
        with self._timeline.span("B", batch=batch, microbatch=action.microbatch, version=action.version):
            source_gradient = megatron.backward_step(source, output, gradient, self._config)
        self._links.backward.send(source_gradient)

    def _apply(self, action: Update) -> int | None:
        self._hooks.before_update(action.batch)
        with self._timeline.span("U", batch=action.batch, version=action.batch + 1):
            report = self._update.apply(action.batch)
        return self._hooks.updated(report)
