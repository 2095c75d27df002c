# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Where a rank's time goes, part by part.

Two runs of the same thing differ by a few percent on a shared machine, which is more than most features cost. So each
part is timed where it runs.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks import training
from benchmarks.training import Alone
from megatron_async.training.loop import Loop

_SPANS = {"F": "forwards", "B": "backwards"}
PARTS = (*_SPANS.values(), "waits", "update", "reductions", "sends", "logs", "data")
"""Compute with the reading of data; messages awaited; clip, step, correction and next weight version; sums over ranks;
messages handed over; what is written; reading by itself."""

BATCH = "batch"
"""Name of the whole batch beside its parts."""

Batch = Mapping[str, float]
"""Milliseconds of a batch and of its parts."""


class _Account:
    """Adds up the time that passes inside some methods of a run until the next batch is complete."""

    def __init__(self, loop: Loop) -> None:
        self.batches: list[Batch] = []
        self._seconds = dict.fromkeys(PARTS, 0.0)
        steps: Any = loop._steps
        links = steps._executor._links
        both = (links.forward, links.backward)
        watched = [("sends", link, "send") for link in both] + [("waits", link, "receive") for link in both]
        for chunk in steps.chunks:
            watched += [("update", chunk.update, "apply")]
            watched += [("reductions", chunk.update, name) for name in ("start", "poll")]
            if chunk.data_iterator is not None:
                chunk.data_iterator = self._iterate(chunk.data_iterator)
        watched += [("logs", loop.metrics, name) for name in ("loss", "extra", "batch")]
        for part, owner, name in watched:
            setattr(owner, name, self._timed(part, getattr(owner, name)))
        loop.timeline.span = self._spans(loop.timeline.span)  # type: ignore[method-assign]
        report = loop.metrics.batch

        def complete(numbers: Any) -> None:
            report(numbers)
            self.batches.append(
                {BATCH: numbers.elapsed * 1e3} | {part: seconds * 1e3 for part, seconds in self._seconds.items()}
            )
            self._seconds = dict.fromkeys(PARTS, 0.0)

        loop.metrics.batch = complete  # type: ignore[method-assign]

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._seconds[part] += time.perf_counter() - start

        return timed

    def _spans(self, span: Callable[..., Any]) -> Callable[..., Any]:
        @contextlib.contextmanager
        def watched(kind: str, **labels: int) -> Iterator[None]:
            start = time.perf_counter()
            with span(kind, **labels):
                yield
            if kind in _SPANS:
                self._seconds[_SPANS[kind]] += time.perf_counter() - start

        return watched

    def _iterate(self, source: Iterator[Any]) -> Iterator[Any]:
        following = self._timed("data", source.__next__)
        while True:
            try:
                yield following()
            except StopIteration:
                return


def _train(loop: Loop) -> list[Batch]:
    account = _Account(loop)
    loop.run()
    return account.batches


def batches(line: Sequence[str]) -> list[Batch]:
    """Train on this rank; return the parts of every batch."""
    return training.one_run(line, _train)


def medians(ranks: Sequence[Mapping[str, Sequence[Batch | Alone]]]) -> dict[str, dict[str, float]]:
    """Each variant's medians on the rank where its batches take longest."""
    return {name: max((_median(rank[name]) for rank in ranks), key=lambda batch: batch[BATCH]) for name in ranks[0]}


def _median(batches: Sequence[Batch | Alone]) -> dict[str, float]:
    parts = [_of_alone(batch) if isinstance(batch, Alone) else batch for batch in batches]
    return {part: statistics.median(batch[part] for batch in parts) for part in (BATCH, *PARTS)}


def _of_alone(batch: Alone) -> Batch:
    own = {BATCH: batch.total, "forwards": batch.forwards, "backwards": batch.backwards, "update": batch.update}
    return dict.fromkeys(PARTS, 0.0) | own
