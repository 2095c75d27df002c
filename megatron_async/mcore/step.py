# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Megatron's forward and backward of a micro-batch."""

import contextlib
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from megatron.core.pipeline_parallel import schedules


@contextlib.contextmanager
def timed_schedule(timeline: Any, batch: int, microbatches: int) -> Iterator[None]:
    """Measure the forwards and backwards of one batch that Megatron's own schedule function runs.

    Args:
        timeline: receives one span for each.
        batch, microbatches: number of the batch and micro-batches in it, for the labels.
    """
    originals = {"F": schedules.forward_step, "B": schedules.backward_step}

    def timed(kind: str) -> Callable[..., Any]:
        numbers = count(batch * microbatches)

        def step(*args: Any, **kwargs: Any) -> Any:
            with timeline.span(kind, batch=batch, microbatch=next(numbers), version=batch):
                return originals[kind](*args, **kwargs)

        return step

    schedules.forward_step, schedules.backward_step = timed("F"), timed("B")
    try:
        yield
    finally:
        schedules.forward_step, schedules.backward_step = originals["F"], originals["B"]
