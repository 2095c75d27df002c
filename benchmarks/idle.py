# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Where the time of a rank goes: compute, and idle time by its cause.

Causes: waiting for a neighbor's message, waiting for reductions, work that the host launched late, and the rest.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron_async.pipeline.timeline import Span

CAUSES = ("receive", "reductions", "host late", "rest")
Shares = dict[str, float]
"""Shares of the time that was looked at: "compute" and each of CAUSES; their sum is 1."""

_LAUNCHES = ("cuda_runtime", "cuda_driver")
_ON_DEVICE = ("kernel", "gpu_memset", "gpu_memcpy")
"""Categories of events in a trace: calls of the host, and what the device does."""

_Interval = tuple[float, float]


def of_spans(spans: Sequence[Span], *, first: bool, last: bool) -> Shares:
    """Shares of a CPU rank, from its timeline: every gap belongs to the action behind it.

    A CPU rank is its own host: before an action that needs no message, Python is at work.

    Args:
        spans: of several batches, in order of time.
        first, last: whether the rank has the first or the last stage.
    """
    parts = dict.fromkeys(("compute", *CAUSES), 0.0)
    waits_for = {"F": "host late" if first else "receive", "B": "host late" if last else "receive", "U": "reductions"}
    end = spans[0].start
    for span in spans:
        parts[waits_for[span.kind]] += max(0.0, span.start - end)
        parts["compute"] += span.start + span.duration - max(end, span.start)
        end = max(end, span.start + span.duration)
    return _shares(parts)


def of_trace(events: Iterable[Mapping[str, Any]]) -> Shares:
    """Shares of a GPU, from the events of a torch.profiler trace in Chrome's format.

    The device computes while any kernel but NCCL's runs. A gap begins as "host late" until the kernel behind it was
    launched. What is left of it belongs to the NCCL kernel that ended last in it: a message or a reduction.
    """
    known = [event for event in events if event.get("cat") in (*_LAUNCHES, *_ON_DEVICE)]
    launched = {_correlation(event): event["ts"] for event in known if event["cat"] in _LAUNCHES}
    device = [event for event in known if event["cat"] in _ON_DEVICE]
    messages = [_interval(event) for event in device if "nccl" in event["name"] and "SendRecv" in event["name"]]
    reductions = [_interval(event) for event in device if "nccl" in event["name"] and "SendRecv" not in event["name"]]
    compute = sorted((event for event in device if "nccl" not in event["name"]), key=lambda event: event["ts"])
    if not compute:
        raise ValueError("the trace has no kernels: the profiler saw no GPU")
    parts = dict.fromkeys(("compute", *CAUSES), 0.0)
    end = compute[0]["ts"]
    for event in compute:
        start, stop = _interval(event)
        if start > end:
            late = min(start, max(end, launched.get(_correlation(event), end)))
            parts["host late"] += late - end
            parts[_ended_by(messages, reductions, (end, start))] += start - late
        parts["compute"] += max(0.0, stop - max(end, start))
        end = max(end, stop)
    return _shares(parts)


def _ended_by(messages: Sequence[_Interval], reductions: Sequence[_Interval], gap: _Interval) -> str:
    message, reduction = (
        max((stop for _, stop in kernels if gap[0] < stop <= gap[1]), default=0.0) for kernels in (messages, reductions)
    )
    if message == reduction == 0.0:
        return "rest"
    return "receive" if message > reduction else "reductions"


def _shares(parts: Mapping[str, float]) -> Shares:
    whole = sum(parts.values())
    return {name: part / whole for name, part in parts.items()}


def _interval(event: Mapping[str, Any]) -> _Interval:
    return event["ts"], event["ts"] + event["dur"]


def _correlation(event: Mapping[str, Any]) -> Any:
    return event.get("args", {}).get("correlation")
