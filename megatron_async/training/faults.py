# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A first loss that is not finite, skipped updates, loss spikes and requests to stop."""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from megatron.core.utils import check_param_hashes_across_dp_replicas

from megatron_async.checkpoint.state import largest
from megatron_async.mcore.batch_sizes import BatchSizes
from megatron_async.training.callbacks import Callback, CompletedBatch
from megatron_async.training.signals import StopRequests

if TYPE_CHECKING:
    from megatron_async.training.loop import Loop


class TrainingFault(RuntimeError):
    """Training cannot go on; all ranks raise it together, and the message says why."""


class EqualReplicas(Callback):
    """Compares the newest weights of data-parallel replicas before the first batch and after every `interval` batches.

    Megatron's check takes hashes of all weights on the host, so it belongs at a drain.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval

    def on_train_begin(self, loop: "Loop") -> None:
        super().on_train_begin(loop)
        self._compare()

    def on_drain(self) -> None:
        """Raise on every rank if they differ, before this state is saved."""
        if self.loop.args.iteration % self._interval == 0:
            self._compare()

    def _compare(self) -> None:
        iteration = self.loop.args.iteration
        if largest(not check_param_hashes_across_dp_replicas(self.loop.model, cross_check=True)):
            raise TrainingFault(
                f"data-parallel replicas hold unequal weights after iteration {iteration}: a device or a link computes "
                "wrong values. Go on from an older checkpoint on other machines (megatron-async doctor examines them)."
            )
        self.loop.note(f"data-parallel replicas hold equal weights after iteration {iteration}")


class FirstLoss(Callback):
    """Ends a run whose first loss is not finite: no later batch would mend it."""

    def __init__(self) -> None:
        self._loss: float | None = None

    @property
    def wants_stop(self) -> bool:
        return self._loss is not None and not math.isfinite(self._loss)

    def on_losses(self, batch: int, losses: Sequence[dict[str, torch.Tensor]]) -> None:
        if self._loss is None:  # the first batch alone may wait for the device
            self._loss = float(sum(part["lm loss"].view(-1)[0].double() for part in losses))

    def on_drain(self) -> None:
        """Raise on every rank."""
        if largest(self.wants_stop):
            raise TrainingFault(
                "the loss of the first batch is not finite, so nothing can be learned. Look at the data, at --lr and "
                "initial weights (--init-method-std), and at the checkpoint if one was loaded."
            )


class StopOnRequest(Callback):
    """Ends a run early after a signal or at the time limit."""

    def __init__(self, requests: StopRequests) -> None:
        self._requests = requests

    @property
    def wants_stop(self) -> bool:
        return self._requests.requested


class SkippedUpdates(Callback):
    """Ends a run after `limit` skipped updates (gradients not finite) in a row."""

    def __init__(self, limit: int, sizes: BatchSizes) -> None:
        self._limit, self._sizes = limit, sizes
        self._row: list[int] = []

    @property
    def wants_stop(self) -> bool:
        return len(self._row) >= self._limit

    def on_batch_end(self, batch: CompletedBatch) -> None:
        if batch.skipped:
            self._row.append(batch.number)
            self.loop.note(
                f"iteration {batch.iteration}: update skipped, its gradient is not finite; samples "
                f"{self._sizes.samples(batch.number)} | in a row: {len(self._row)} of at most {self._limit}"
            )
        elif not self.wants_stop:  # after the limit, batches in flight still complete
            self._row.clear()

    def on_drain(self) -> None:
        """Raise on every rank if one rank has reached the limit."""
        if largest(self.wants_stop):
            self.loop.checkpoints.finish()
            raise TrainingFault(self.verdict(self.loop.checkpoints.saved))

    def verdict(self, saved: int | None) -> str:
        """The message of the error; `saved` is the iteration of the newest checkpoint."""
        if not self._row:
            return "another stage has skipped too many updates in a row; see its message"
        first, last = self._row[0], self._row[-1]
        return (
            f"{len(self._row)} updates in a row were skipped because a gradient was not finite (iterations {first + 1} "
            f"to {last + 1}, samples {self._sizes.samples(first, last)}; the limit is --max-consecutive-skips "
            f"{self._limit}). The newest checkpoint is that of iteration {'none' if saved is None else saved}. Look at "
            "these samples, lower --lr, or start further back with --ckpt-step and another --save."
        )


class LossSpikes:
    """Detects loss spikes.

    A spike exceeds the median of the last `window` losses by more than `factor` interquartile ranges and by more than
    10 %, so the noise of a flat curve does not count.
    """

    def __init__(self, window: int = 50, factor: float = 5.0) -> None:
        self._recent: deque[float] = deque(maxlen=window)
        self._factor = factor

    def is_spike(self, loss: float) -> bool:
        """Whether a loss is a spike. Records the loss."""
        spike = False
        if len(self._recent) == self._recent.maxlen:
            low, middle, high = statistics.quantiles(self._recent, n=4)
            spike = loss > max(middle + self._factor * (high - low), 1.1 * middle)
        if loss == loss:
            self._recent.append(loss)
        return spike
