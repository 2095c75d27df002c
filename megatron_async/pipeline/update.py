# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The update of a chunk: reductions of a batch's gradients, the norm over all stages, one optimizer step.

`start(b)` is the schedule's R(b); `wait(b)` and `apply(b)` are its U(b). Gradients are clipped by the global norm over
all ranks that hold a part of them, exactly as in a synchronous run. `Launch` says when the parts of this chain are
launched. They run on a stream beside the compute, and U makes the compute wait for that stream.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from megatron_async.mcore.optimizer import gathering_buckets, gathers_whole_parameters, publish_weights
from megatron_async.mcore.parallel import device, reduce_over_tensor_parallel
from megatron_async.optim.layout import layout_of
from megatron_async.optim.step import MasterStep, StepContext
from megatron_async.pipeline.accumulators import Accumulators
from megatron_async.pipeline.collectives import Sums, UpdateCollectives
from megatron_async.pipeline.decision import Decision, UpdateRule
from megatron_async.pipeline.reduction import Reduction, poll_in_order
from megatron_async.pipeline.weights import WeightVersions


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


class Launch(Enum):
    """When the host launches the parts of an update."""

    AT_UPDATE = "at the update"
    """The step at U. For CPUs, where each collective is launched when the one before it is found complete."""
    WHEN_KNOWN = "when the norm is known"
    """The step as soon as the host finds the norm. For GPUs, where R launches all collectives. Ranks find it at
    different moments, so the step must not hold up the compute that others need to come that far: each stream has a
    hardware queue of its own."""
    AT_ONCE = "at once"
    """The whole chain at R. The device clips and decides whether the step applies; the host reads the norm before the
    next step, a whole batch later. The host must be able to launch a step while the device does not start it."""


@dataclass(frozen=True, slots=True)
class _Unreported:
    """An update that was launched at once: its sums, and what the device may still have to read."""

    batch: int
    sums: Sums
    logits: torch.Tensor | None
    tokens: torch.Tensor | None


class DeferredUpdate:
    """Reduces and applies the gradients of one model chunk.

    Args:
        index: number of the chunk on this rank.
        chunk: the chunk, wrapped by Megatron's DistributedDataParallel.
        optimizer: Megatron's optimizer of the chunk and nothing else.
        weights: their versions.
        accumulators: sums over the micro-batches of a batch.
        master_step: steps the master weights through an explicit list of parts.
        corrected: number of a batch -> whether the correction of the delay applies to its update.
        rule: clipping and normalization.
        launch: when the host launches the parts. The first step, which creates the optimizer's state, is never
            launched at once.
    """

    def __init__(
        self,
        *,
        index: int,
        chunk: Any,
        optimizer: MegatronOptimizer,
        weights: WeightVersions,
        accumulators: Accumulators,
        master_step: MasterStep,
        corrected: Callable[[int], bool],
        rule: UpdateRule,
        launch: Launch = Launch.AT_UPDATE,
    ) -> None:
        self._index, self._chunk, self._optimizer = index, chunk, optimizer
        self._weights, self._accumulators = weights, accumulators
        self._master_step, self._corrected = master_step, corrected
        self._model_params = tuple(chunk.parameters())
        self._collectives = UpdateCollectives(index, chunk, optimizer, accumulators, rule)
        # The layer-wise optimizer gathers over groups of Megatron's, so at a fixed place. On CPUs the host waits in a
        # collective, so ranks must come to it in the order of the schedule.
        early = not gathers_whole_parameters(optimizer) and (
            launch is not Launch.WHEN_KNOWN or device().type == "cuda" or not self._step_has_collectives()
        )
        self._launch = launch if early else Launch.AT_UPDATE
        # A device comes to each collective by itself. If hosts launched one when they find the one before it complete,
        # a rank that synchronizes its device could wait for the norm of a rank whose host waits for that rank.
        self._chains_at_once = launch is Launch.AT_ONCE or device().type == "cuda"
        self._streams: Any = torch.get_device_module(device())
        self._stream = self._streams.Stream(priority=-1)  # before compute, where both are ready
        self._in_flight: dict[int, Reduction] = {}
        self._tokens: dict[int, torch.Tensor | None] = {}
        self._reports: dict[int, UpdateReport] = {}
        self._done: dict[int, Any] = {}
        self._unreported: _Unreported | None = None
        self._stepped = False
        self.all_at_update = False
        """Whether norms too are launched at U: in a batch in which every rank may synchronize its device."""

    def start(self, batch: int, tokens: torch.Tensor | None, shared: Sequence[float]) -> None:
        """Start the chain of `batch`, whose gradients are complete.

        Args:
            batch: number of the batch.
            tokens: number of tokens in this rank's share of the batch, where it is known: on the last stage.
            shared: numbers to be summed over all ranks on the way, the same count on every rank.
        """
        with self._accumulators.gradients.reading(batch):
            reduce_over_tensor_parallel(self._chunk)  # on the stream of the compute, whose process group it shares
        self._stream.wait_stream(self._streams.current_stream())
        with self._beside(), torch.no_grad():
            chain = Reduction(self._collectives.steps(batch, tokens, shared))
            if self._launch is Launch.AT_ONCE and self._stepped and not self._in_flight:
                chain.finish()
                self._step_at_once(batch, tokens)
                return
        self._in_flight[batch], self._tokens[batch] = chain, tokens
        if self._chains_at_once and not self.all_at_update:
            self._launch_chains()

    def poll(self) -> None:
        """Launch what has become possible, batch by batch."""
        if not self._in_flight or self.all_at_update:
            return
        self._launch_chains()
        oldest = next(iter(self._in_flight))
        # A later step may need what the loop does after the report of this one.
        if self._launch is not Launch.AT_UPDATE and oldest not in self._reports and self._collectives.known(oldest):
            self._step_or_skip(oldest)

    def _launch_chains(self) -> None:
        with self._beside(), torch.no_grad():
            if not self._chains_at_once:
                poll_in_order(self._in_flight.values())
                return
            for batch, chain in self._in_flight.items():
                chain.finish()
                if batch not in self._reports:
                    return  # its step must not stand behind the norm of a later batch

    @property
    def waits_for_norm(self) -> bool:
        """Whether a norm is on its way, and a step to be launched when it is known: `poll` does it.

        Not on CPUs: there the norm may depend on further actions of this host.
        """
        early = self._chains_at_once and self._launch is not Launch.AT_UPDATE and not self.all_at_update
        return early and bool(self._in_flight.keys() - self._reports.keys())

    def known(self, batch: int) -> bool:
        """Whether `apply` would not wait for the norm."""
        return batch not in self._in_flight or batch in self._reports or self._collectives.known(batch)

    def wait(self, batch: int) -> None:
        """Before the update of `batch`: wait for its reductions. In steady state they are done by now."""
        if batch in self._in_flight:
            with self._beside(), torch.no_grad():
                self._in_flight[batch].finish()

    def apply(self, batch: int) -> UpdateReport | None:
        """After `wait`: publish the next weight version. Returns the report, unless the step was launched at once."""
        report = None
        if batch in self._in_flight:
            if batch not in self._reports:
                self._step_or_skip(batch)
            report = self._reports.pop(batch)
            self._weights.use(batch + 1)  # who reads the report sees the weights of the update
            del self._in_flight[batch], self._tokens[batch]
        self._streams.current_stream().wait_event(self._done.pop(batch))
        return report

    def report(self) -> UpdateReport | None:
        """The report of an update that was launched at once, one time. The host waits for its norm.

        Due before `start`: the next step must know whether this one applied.
        """
        if (update := self._unreported) is None:
            return None
        self._unreported = None
        if (done := self._done.get(update.batch)) is not None:
            self._streams.current_stream().wait_event(done)
        self._weights.use(update.batch + 1)
        _, report = self._read(update.batch, update.sums, update.logits)
        if report.skipped:
            self._master_step.take_back()
        return report

    def _step_has_collectives(self) -> bool:
        """Whether ranks meet in a step: they gather weights, or orthogonalize matrices that are cut among them."""
        gathers = any(
            buckets.intra_distributed_optimizer_instance_size > 1 for buckets in gathering_buckets(self._chunk)
        )
        return gathers or any(layout_of(param).shards is not None for param in self._model_params)

    def _beside(self) -> AbstractContextManager[None]:
        """Launch on the stream beside the compute."""
        stream: AbstractContextManager[None] = self._streams.stream(self._stream)
        return stream

    def _read(self, batch: int, sums: Sums, logits: torch.Tensor | None) -> tuple[Decision, UpdateReport]:
        """The decision on the host, and the report. Waits for the sums."""
        decision, shared = sums.read()
        applies = bool(decision.applies)
        norm = float(decision.grad_norm) if applies else math.nan
        return decision, UpdateReport(self._index, batch, norm, not applies, shared, logits)

    def _take(self, batch: int) -> tuple[Sums, torch.Tensor | None]:
        """The results of the chain's collectives."""
        return self._collectives.take(batch), self._accumulators.take_logits(batch)

    def _step_or_skip(self, batch: int) -> None:
        """Step with a norm that the host knows, or skip."""
        with self._beside():
            sums, logits = self._take(batch)
            decision, report = self._read(batch, sums, logits)
            factor = decision.factor.item()
            self._advance(batch, None if report.skipped else StepContext(batch, factor, self._corrected(batch), logits))
            self._reports[batch] = report

    def _step_at_once(self, batch: int, tokens: torch.Tensor | None) -> None:
        """Launch a step of which the device decides whether it applies."""
        assert self._unreported is None, "the last update was not reported"
        sums, logits = self._take(batch)
        self._unreported = _Unreported(batch, sums, logits, tokens)
        for flat in self._accumulators.gradients.flat(batch):
            flat.data.nan_to_num_(0.0, 0.0, 0.0)  # the step must not meet what it is to be protected from
        decision = sums.decision
        self._advance(batch, StepContext(batch, decision.factor, self._corrected(batch), logits, decision.applies))

    @torch.no_grad()
    def _advance(self, batch: int, context: StepContext | None) -> None:
        """Make the next weight version, with a step or without."""
        self._weights.open_next()
        if context is None:
            self._accumulators.routers.forget(batch)
        else:
            self._step(context)
            self._stepped = True
        self._weights.publish_next(batch + 1)
        self._accumulators.gradients.clear(batch)
        self._done[batch] = self._stream.record_event()

    def _step(self, context: StepContext) -> None:
        with self._accumulators.gradients.reading(context.batch):
            self._optimizer.prepare_grads()
            # Graphs in flight were recorded with other storage behind these parameters; an in-place step on them is
            # no change to what those graphs saved, so it must not count as one.
            with _unsafe_preserve_version_counter(self._model_params):
                self._master_step(context)
                publish_weights(self._optimizer)
            self._optimizer.zero_grad()
        self._accumulators.routers.apply(context.batch, context.applies)
