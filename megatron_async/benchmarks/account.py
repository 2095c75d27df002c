# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Where a rank's time goes beside forwards and backwards, part by part.

Two runs of the same thing differ by a few percent on a shared machine, which is more than most features cost. So each
part is timed where it runs.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megatron_async.benchmarks import training
from megatron_async.training.loop import Loop

PARTS = ("update", "reductions", "sends", "logs", "data")
"""Clip, step, correction and next weight version; sums over ranks; messages handed over; what is written; reading."""

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
        watched = [("sends", link, "send") for link in (links.forward, links.backward)]
        for chunk in steps.chunks:
            watched += [("update", chunk.update, "apply")]
            watched += [("reductions", chunk.update, name) for name in ("start", "poll")]
            if chunk.data_iterator is not None:
                chunk.data_iterator = self._iterate(chunk.data_iterator)
        watched += [("logs", loop.metrics, name) for name in ("loss", "extra", "batch")]
        for part, owner, name in watched:
            setattr(owner, name, self._timed(part, getattr(owner, name)))
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


def in_turns(*arguments: Any) -> dict[str, list[Batch]]:
    """`training.in_turns`, with the parts of every batch."""
    return training.in_turns(*arguments, action=_train)


def medians(ranks: Sequence[Mapping[str, Sequence[Batch]]]) -> dict[str, dict[str, float]]:
    """Each variant's medians on the rank where its batches take longest."""
    return {name: max((_median(rank[name]) for rank in ranks), key=lambda batch: batch[BATCH]) for name in ranks[0]}


def _median(batches: Sequence[Batch]) -> dict[str, float]:
    return {part: statistics.median(batch[part] for batch in batches) for part in (BATCH, *PARTS)}
