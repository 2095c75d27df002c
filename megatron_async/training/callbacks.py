# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Callbacks: the public protocol through which metrics, faults, traces, benchmarks and tests observe a run."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from megatron_async.pipeline.update import UpdateReport

if TYPE_CHECKING:
    from megatron_async.training.loop import Loop


class Pending(Protocol):
    """Values of a batch that may still be on their way over other ranks."""

    @property
    def ready(self) -> bool:
        """Whether `read` returns without waiting."""

    def read(self) -> Mapping[str, Any]:
        """The values by their names in the metrics file."""


@dataclass(frozen=True, slots=True)
class Known:
    """Values that are known already."""

    values: Mapping[str, Any]
    ready: bool = True

    def read(self) -> Mapping[str, Any]:
        return self.values


@dataclass(slots=True)
class CompletedBatch:
    """A batch whose update is done on this rank.

    Attributes:
        number: from 0.
        reports: one for each model chunk of this rank.
        learning_rate: of its update.
        seconds: since the previous batch was completed, without evaluations and saves.
        bubble_share: idle share of that time, averaged over all ranks; None while it is not known.
        pending: further values for the metrics file. Callbacks add theirs.
    """

    number: int
    reports: Sequence[UpdateReport]
    learning_rate: float
    seconds: float
    bubble_share: float | None
    pending: list[Pending] = field(default_factory=list)

    @property
    def iteration(self) -> int:
        """Number of completed batches."""
        return self.number + 1

    @property
    def grad_norm(self) -> float:
        """L2 norm of the gradient before clipping."""
        return math.hypot(*(report.grad_norm for report in self.reports))

    @property
    def skipped(self) -> bool:
        """Whether the update was skipped because a gradient was not finite."""
        return any(report.skipped for report in self.reports)


class Callback:
    """Observes a run. The default methods do nothing.

    Every rank calls them at the same points of its own schedule. Between two drains, no method may wait for another
    rank.
    """

    @property
    def wants_stop(self) -> bool:
        """Whether the run shall end early. One rank is enough; all ranks stop after the same batch."""
        return False

    def on_train_begin(self, loop: "Loop") -> None:
        """Before the first batch."""

    def on_action(self, kind: str, batch: int) -> None:
        """Before an action of the schedule: F, B, R or U. A run of Megatron's own schedule reports F once a batch."""

    def on_losses(self, batch: int, losses: Sequence[dict[str, torch.Tensor]]) -> None:
        """On the last stage, when the forwards of a batch are done: Megatron's loss dictionary of each micro-batch."""

    def on_batch_end(self, batch: CompletedBatch) -> None:
        """After the update of a batch."""

    def on_drain(self) -> None:
        """After each segment, when the pipe is empty on all ranks. May use collectives."""

    def on_evaluation_begin(self, iteration: int) -> None:
        """Before an evaluation."""

    def on_evaluation_end(self, iteration: int, loss: float | None) -> None:
        """After an evaluation; the validation loss on ranks that know it."""

    def on_save_begin(self, iteration: int) -> None:
        """Before a checkpoint is saved."""

    def on_save_end(self, iteration: int) -> None:
        """After a checkpoint is saved or, with `--async-save`, after its background write has begun."""

    def on_note(self, text: str) -> None:
        """A message for the log."""

    def on_train_end(self, complete: bool) -> None:
        """After the last batch, or after a failure.

        Args:
            complete: whether all ranks end together, so that collectives and values on their way will finish.
        """
