# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""When a rank computed what: the source of the bubble share in the log and of the trace file."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_async.mcore.parallel import device


@dataclass(frozen=True, slots=True)
class Span:
    """One action's compute on this rank; start and duration in seconds on the host's monotonic clock."""

    kind: str
    start: float
    duration: float
    labels: dict[str, int]


class Timeline:
    """Measures compute spans of one rank.

    On CPUs a span is the time between entering and leaving. On GPUs work is only queued by then, so CUDA events mark
    both ends and are read later, when they have passed; nothing waits for them.

    Args:
        keep_batches: spans of that many batches are kept for a trace, counted from the first one seen; 0 keeps none.
    """

    def __init__(self, keep_batches: int = 0) -> None:
        self._keep_batches = keep_batches
        self._first_batch: int | None = None
        self._kept: list[Span] = []
        self._busy = 0.0
        self.seconds = {"F": 0.0, "B": 0.0, "U": 0.0}
        """Seconds of the spans of each kind so far."""
        self._on_gpu = device().type == "cuda"
        self._pending: list[tuple[str, torch.cuda.Event, torch.cuda.Event, dict[str, int]]] = []
        self._origin: torch.cuda.Event | None = None
        self._origin_time = 0.0

    @contextlib.contextmanager
    def span(self, kind: str, **labels: int) -> Iterator[None]:
        """Measure the compute in the `with` block; kind F, B or U, labels such as batch and micro-batch."""
        if self._on_gpu:
            begin, end = self._mark(), torch.cuda.Event(enable_timing=True)
            yield
            end.record()
            self._pending.append((kind, begin, end, labels))
            return
        start = time.perf_counter()
        yield
        self._add(Span(kind, start, time.perf_counter() - start, labels))

    def busy_since_last(self) -> float:
        """Seconds of compute that became known since the last call."""
        while self._pending and self._pending[0][2].query():
            kind, begin, end, labels = self._pending.pop(0)
            assert self._origin is not None
            start = self._origin_time + self._origin.elapsed_time(begin) / 1000
            self._add(Span(kind, start, begin.elapsed_time(end) / 1000, labels))
        busy, self._busy = self._busy, 0.0
        return busy

    def kept(self) -> list[Span]:
        """Spans for the trace, in order."""
        return list(self._kept)

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        if self._origin is None:
            self._origin, self._origin_time = event, time.perf_counter()
        return event

    def _add(self, span: Span) -> None:
        self._busy += span.duration
        self.seconds[span.kind] += span.duration
        batch = span.labels["batch"]
        if self._first_batch is None:
            self._first_batch = batch
        if batch < self._first_batch + self._keep_batches:
            self._kept.append(span)
