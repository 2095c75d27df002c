# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Spans of the forwards and backwards that Megatron's own schedules run."""

import contextlib
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from megatron_async.mcore.patches import temporary


@contextlib.contextmanager
def timed_schedule(timeline: Any, batch: int, microbatches: int) -> Iterator[None]:
    """Record a span for each forward and backward of a batch that a Megatron schedule function runs.

    Args:
        timeline: receives the spans.
        batch: number of the batch.
        microbatches: number of micro-batches in it.
    """

    def timed(kind: str) -> Callable[[Any], Any]:
        numbers = count(batch * microbatches)

        def replace(original: Callable[..., Any]) -> Callable[..., Any]:
            def step(*args: Any, **kwargs: Any) -> Any:
                with timeline.span(kind, batch=batch, microbatch=next(numbers), version=batch):
                    return original(*args, **kwargs)

            return step

        return replace

    with temporary.FORWARD_STEP.replaced(timed("F")), temporary.BACKWARD_STEP.replaced(timed("B")):
        yield
