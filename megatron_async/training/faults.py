# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""What can go wrong with the numbers of a run: updates that are skipped again and again, a loss that jumps."""

import statistics
from collections import deque
from typing import TYPE_CHECKING

from megatron_async.checkpoint.state import largest
from megatron_async.training.callbacks import Callback, CompletedBatch
from megatron_async.training.signals import StopRequests

if TYPE_CHECKING:
    from megatron_async.training.loop import Loop


class TooManySkips(RuntimeError):
    """Updates were skipped again and again; the message names the samples."""


class StopOnRequest(Callback):
    """Ends a run early that a signal or the time limit asked to end."""

    def __init__(self, requests: StopRequests) -> None:
        self._requests = requests

    @property
    def wants_stop(self) -> bool:
        return self._requests.requested


class SkippedUpdates(Callback):
    """Ends a run whose updates were skipped several times in a row because a gradient was not finite.

    Args:
        limit: number in a row at which training stops.
        global_batch_size: samples of a batch.
    """

    def __init__(self, limit: int, global_batch_size: int) -> None:
        self._limit, self._batch_size = limit, global_batch_size
        self._row: list[int] = []
        self._loop: Loop | None = None

    @property
    def wants_stop(self) -> bool:
        return len(self._row) >= self._limit

    def on_train_begin(self, loop: "Loop") -> None:
        self._loop = loop

    def on_batch_end(self, batch: CompletedBatch) -> None:
        if batch.skipped:
            self._row.append(batch.number)
            self._note(
                f"iteration {batch.iteration}: update skipped, its gradient is not finite; samples "
                f"{samples(batch.number, self._batch_size)} | in a row: {len(self._row)} of at most {self._limit}"
            )
        elif not self.wants_stop:  # batches in flight run to their end; the verdict stays
            self._row.clear()

    def on_drain(self) -> None:
        """Raise `TooManySkips` on every rank if one has reached the limit."""
        if largest(self.wants_stop):
            assert self._loop is not None
            self._loop.checkpoints.finish()
            raise self.error(self._loop.checkpoints.saved)

    def error(self, saved: int | None) -> TooManySkips:
        """The reason to stop; `saved` is the iteration of the newest checkpoint."""
        if not self._row:
            return TooManySkips("another stage has skipped too many updates in a row; see its message")
        first, last = self._row[0], self._row[-1]
        return TooManySkips(
            f"{len(self._row)} updates in a row were skipped because a gradient was not finite (iterations {first + 1} "
            f"to {last + 1}, samples {samples(first, self._batch_size, last)}; the limit is --max-consecutive-skips "
            f"{self._limit}). The newest checkpoint is that of iteration {'none' if saved is None else saved}. Look at "
            "these samples, lower --lr, or start further back with --ckpt-step."
        )

    def _note(self, text: str) -> None:
        if self._loop is not None:
            self._loop.note(text)


def samples(batch: int, global_batch_size: int, last: int | None = None) -> str:
    """Numbers of the samples in a batch, or in batches up to `last`, in the order of the run, both ends included."""
    end = ((batch if last is None else last) + 1) * global_batch_size - 1
    return f"{batch * global_batch_size} to {end}"


class LossSpikes:
    """Reports a loss far above those just before it.

    A spike is a loss above the median of the last `window` by more than `factor` times their interquartile range and
    by more than 10 % (so that a flat curve's noise is none).
    """

    def __init__(self, window: int = 50, factor: float = 5.0) -> None:
        self._recent: deque[float] = deque(maxlen=window)
        self._factor = factor

    def is_spike(self, loss: float) -> bool:
        """Judge a loss and remember it."""
        spike = False
        if len(self._recent) == self._recent.maxlen:
            low, middle, high = statistics.quantiles(self._recent, n=4)
            spike = loss > max(middle + self._factor * (high - low), 1.1 * middle)
        if loss == loss:
            self._recent.append(loss)
        return spike
