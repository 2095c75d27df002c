# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Runs a schedule's actions on one rank: one short method for each kind of action.

The executor knows no particular schedule. In steady state it waits for its neighbors' activations and gradients, and
for nothing else. Updates advance between actions and are due at their place in the schedule.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.schedules import backward_step, deallocate_output_tensor
from megatron.core.pipeline_parallel.schedules import forward_step as megatron_forward_step
from megatron.core.utils import get_model_config

from megatron_async.pipeline.accumulators import Accumulators
from megatron_async.pipeline.links import StageLinks
from megatron_async.pipeline.timeline import Timeline
from megatron_async.pipeline.update import DeferredUpdate, UpdateReport
from megatron_async.pipeline.weights import WeightVersions
from megatron_async.platform.host import Pace
from megatron_async.schedules.actions import Action, Backward, Forward, Reduce, Update

_INTERVAL = 1e-4
"""Seconds between two looks of a host that waits."""
_PATIENCE = 1.0
"""Seconds that a host waits for its device before it launches steps meanwhile: longer than most actions."""

Plan = Callable[[int], Iterator[Action]]
"""Number of batches -> this rank's actions for a segment of that many batches."""


@dataclass(slots=True)
class Chunk:
    """A model chunk of this rank, with the state of the batches in flight.

    Attributes:
        module: the wrapped model chunk.
        data_iterator: micro-batches in order, or None on stages without data.
        first, last: whether the chunk begins or ends the model.
        in_flight: (input, output) of forwards whose backward is still to come, in order.
        losses, tokens: reports of the forwards of the current batch.
    """

    module: Any
    data_iterator: Any
    first: bool
    last: bool
    weights: WeightVersions
    accumulators: Accumulators
    update: DeferredUpdate
    in_flight: deque[tuple[torch.Tensor | None, torch.Tensor]] = field(default_factory=deque)
    losses: list[dict[str, torch.Tensor]] = field(default_factory=list)
    tokens: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MicrobatchStep:
    """How a micro-batch is computed.

    Attributes:
        forward_step: Megatron's forward step function: (data iterator, model) -> (output, loss function).
        microbatches: micro-batches per batch, M; the loss is divided by it before backward.
        context_parallel_size: for Megatron's loss scaling.
    """

    forward_step: Callable[..., Any]
    microbatches: int
    context_parallel_size: int


@dataclass(frozen=True, slots=True)
class Hooks:
    """The training loop's part in a schedule; none of these may wait for another rank.

    Attributes:
        losses: called on the last stage when the forwards of a batch are done, with Megatron's loss dictionaries.
        action: called before each action with its kind (F, B, R, U) and batch.
        shared: numbers to be summed over all ranks with the reductions of a chunk and batch.
        updated: called after each update; may return a batch after which the segment ends early.
        acted: called after each action, before the wait for the input of the next one.
    """

    losses: Callable[[int, Sequence[dict[str, torch.Tensor]]], None]
    action: Callable[[str, int], None]
    shared: Callable[[int, int], Sequence[float]]
    updated: Callable[[UpdateReport], int | None]
    acted: Callable[[], None]


class StageFailure(RuntimeError):
    """A stage failed. The message names the rank and its place in the schedule."""


class Executor:
    """Runs segments of a schedule on one rank; between segments the pipe is empty.

    Args:
        chunks: model chunks of this rank.
        step: how a micro-batch is computed.
        links: to the neighbors.
        hooks: the training loop's part.
        timeline: measures the actions.
        pace: keeps the host from running ahead of the device.
    """

    def __init__(
        self,
        *,
        chunks: Sequence[Chunk],
        step: MicrobatchStep,
        links: StageLinks,
        hooks: Hooks,
        timeline: Timeline,
        pace: Pace | None = None,
    ) -> None:
        self._chunks, self.step, self._links, self._hooks, self._timeline = chunks, step, links, hooks, timeline
        self._pace = pace
        self._config = get_model_config(chunks[0].module)

    def run(self, plan: Plan, *, first_batch: int, batches: int) -> int:
        """Fill the pipe, run a segment, drain the pipe.

        Args:
            plan: actions of this rank for any number of batches; shorter plans are prefixes (see the schedule).
            first_batch: number of the segment's first batch.
            batches: number of batches, unless a hook ends the segment earlier.

        Returns:
            The number of batches that were run.
        """
        self._expect(batches)
        actions, done = plan(batches), 0
        while (action := next(actions, None)) is not None:
            done += 1
            try:
                stop_after = self._perform(action)
                self._hooks.acted()
                if self._pace is not None and isinstance(action, Forward | Backward):
                    self._keep_pace(self._pace)
                self._poll()
            except RuntimeError as error:
                raise StageFailure(self._place(action, done, first_batch)) from error
            if stop_after is not None and stop_after + 1 < first_batch + batches:
                self._expect(stop_after + 1 - first_batch - batches)
                batches = stop_after + 1 - first_batch
                actions = islice(plan(batches), done, None)
        self._links.drain()
        for chunk in self._chunks:
            self._report(chunk)
        assert not any(chunk.in_flight for chunk in self._chunks)
        return batches

    def _poll(self) -> None:
        for chunk in self._chunks:
            chunk.update.poll()

    def _keep_pace(self, pace: Pace) -> None:
        """Wait until the device has finished all forwards and backwards but the last one.

        Steps are launched between actions: at other moments they would delay the pipeline on every rank anew. But where
        the device waits for other ranks, these may wait for a step of this one: they meet in the gather of its weights.
        """
        if (finished := pace()) is not None:
            self._poll_until(finished.query, patience=_PATIENCE)
            finished.synchronize()

    def _poll_until(self, ready: Callable[[], bool], patience: float = 0.0) -> None:
        """After some seconds of patience, poll until it is ready or no step is left to launch."""
        begin = time.monotonic()
        while not ready() and any(chunk.update.waits_for_norm for chunk in self._chunks):
            time.sleep(_INTERVAL)
            if time.monotonic() >= begin + patience:
                self._poll()

    def _expect(self, batches: int) -> None:
        """More (or, where negative, fewer) batches are to come over the links."""
        microbatches = batches * self.step.microbatches
        self._links.forward.expect(microbatches * sum(not chunk.first for chunk in self._chunks))
        self._links.backward.expect(microbatches * sum(not chunk.last for chunk in self._chunks))

    def _place(self, action: Action, number: int, first_batch: int) -> str:
        """Where this rank is in the schedule: for the message of a failure."""
        if isinstance(action, Forward | Backward):
            batch = action.microbatch // self.step.microbatches
        else:
            batch = action.batch
        return (
            f"rank {dist.get_rank()} failed in {action} of batch {batch}, action {number} of the segment that began "
            f"with batch {first_batch}"
        )

    def _perform(self, action: Action) -> int | None:
        match action:
            case Forward():
                self._forward(action)
            case Backward():
                self._backward(action)
            case Reduce():
                return self._reduce(action)
            case Update():
                return self._apply(action)
        return None

    def _computing(self, action: Forward | Backward, batch: int) -> AbstractContextManager[None]:
        """The chunk has the action's weights and adds to its batch; the block is measured."""
        chunk = self._chunks[action.chunk]
        chunk.weights.use(action.version)
        # For a forward too: fused weight gradients (Apex, Transformer Engine) may take main_grad at that time.
        chunk.accumulators.use(batch)
        self._hooks.action(action.kind, batch)
        labels = {"batch": batch, "microbatch": action.microbatch, "version": action.version, "chunk": action.chunk}
        return self._timeline.span(action.kind, **labels)

    def _forward(self, action: Forward) -> None:
        chunk = self._chunks[action.chunk]
        self._links.post_due(action.due)
        batch, position = divmod(action.microbatch, self.step.microbatches)
        source = None if chunk.first else self._links.forward.receive()
        if source is not None:
            source.requires_grad_()
        with self._computing(action, batch):
            output, tokens = megatron_forward_step(
                self.step.forward_step,
                chunk.data_iterator,
                chunk.module,
                self.step.microbatches,
                source,
                chunk.losses,
                self._config,
                self.step.context_parallel_size,
                current_microbatch=position,
                vp_stage=action.chunk if len(self._chunks) > 1 else None,
                is_last_stage=chunk.last,
            )
        if not chunk.last:
            self._links.forward.send(output)
        # What comes back is a gradient; of the output only its place in the graph is needed from now on.
        deallocate_output_tensor(output, self._config.deallocate_pipeline_outputs)
        chunk.in_flight.append((source, output))
        if chunk.last:
            chunk.tokens[batch] = chunk.tokens[batch] + tokens if batch in chunk.tokens else tokens
            if position == self.step.microbatches - 1:
                losses, chunk.losses = chunk.losses, []
                self._hooks.losses(batch, losses)

    def _backward(self, action: Backward) -> None:
        chunk = self._chunks[action.chunk]
        self._links.post_due(action.due)
        batch = action.microbatch // self.step.microbatches
        gradient = None if chunk.last else self._links.backward.receive()
        source, output = chunk.in_flight.popleft()
        with self._computing(action, batch):
            source_gradient = backward_step(source, output, gradient, self._config)
        if not chunk.first:
            self._links.backward.send(source_gradient)

    def _reduce(self, action: Reduce) -> int | None:
        chunk = self._chunks[action.chunk]
        # The step of the last batch comes before the next chain.
        self._poll_until(lambda: not chunk.update.waits_for_norm)
        stop_after = self._report(chunk)
        self._hooks.action(action.kind, action.batch)
        chunk.update.start(
            action.batch, chunk.tokens.pop(action.batch, None), self._hooks.shared(action.chunk, action.batch)
        )
        return stop_after

    def _apply(self, action: Update) -> int | None:
        self._hooks.action(action.kind, action.batch)
        update = self._chunks[action.chunk].update
        update.wait(action.batch)
        self._poll_until(lambda: update.known(action.batch))
        with self._timeline.span("U", batch=action.batch, version=action.batch + 1, chunk=action.chunk):
            report = update.apply(action.batch)
        return None if report is None else self._hooks.updated(report)

    def _report(self, chunk: Chunk) -> int | None:
        """Report an update of the chunk that was launched at once."""
        report = chunk.update.report()
        return None if report is None else self._hooks.updated(report)
