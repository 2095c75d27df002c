# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Callbacks: metrics, faults, traces, benchmarks and tests observe a run through them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from megatron_async.pipeline.update import UpdateReport
from megatron_async.platform.host import Reduced

if TYPE_CHECKING:
    from megatron_async.training.loop import Loop


Pending = Reduced[Mapping[str, Any]]
"""Values of a batch by their names in the metrics file, which may not have arrived yet."""


@dataclass(slots=True)
class CompletedBatch:
    """A batch whose update is complete on this rank.

    Attributes:
        number: from 0.
        reports: one for each model chunk of this rank.
        learning_rate: of the update.
        seconds: since the previous batch, without evaluations and saves.
        bubble_share: idle share of that time, averaged over all ranks; None if unknown.
        values: further values for the metrics file; callbacks add to them.
        pending: values that may arrive later; callbacks add to them.
    """

    number: int
    reports: Sequence[UpdateReport]
    learning_rate: float
    seconds: float
    bubble_share: float | None
    values: dict[str, Any] = field(default_factory=dict)
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
    """Observes a run. The default methods do nothing, except that `on_train_begin` keeps the loop.

    All ranks call the methods in the order of their own schedule. Between two drains, a method must not wait for
    other ranks.
    """

    @property
    def wants_stop(self) -> bool:
        """Whether the run should end early. All ranks stop after the same batch as soon as one returns True."""
        return False

    def on_train_begin(self, loop: "Loop") -> None:
        """Before the first batch."""
        self.loop = loop

    def on_action(self, kind: str, batch: int) -> None:
        """Before an action F, B, R or U. With Megatron's own schedule: F and U, once per batch."""

    def on_action_end(self) -> None:
        """After an action, before the wait for the input of the next one. Not with Megatron's own schedule."""

    def on_losses(self, batch: int, losses: Sequence[dict[str, torch.Tensor]]) -> None:
        """On the last stage, after all forwards of a batch: Megatron's loss dictionary of each micro-batch."""

    def on_batch_end(self, batch: CompletedBatch) -> None:
        """After the update of a batch."""

    def on_drain(self) -> None:
        """After each segment, when the pipeline is empty on all ranks. May use collectives."""

    def on_evaluation_begin(self, iteration: int) -> None:
        """Before an evaluation of the validation sets."""

    def on_evaluated(self, iteration: int, name: str, loss: float | None) -> None:
        """After each set of an evaluation: its name, empty for the one validation set. "test" after the last save."""

    def on_evaluation_end(self, iteration: int, loss: float | None) -> None:
        """After an evaluation: the loss of the first set; None on ranks that do not know it, or if it was given up."""

    def on_save_begin(self, iteration: int) -> None:
        """Before a checkpoint is saved."""

    def on_save_end(self, iteration: int) -> None:
        """After a checkpoint is saved or, with `--async-save`, after its background write has started."""

    def on_note(self, text: str) -> None:
        """A message for the log."""

    def on_train_end(self, complete: bool) -> None:
        """After the last batch or a failure. `complete`: all ranks end together, so collectives will finish."""
