# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A simulated table as text, JSON or Chrome trace events, and as a figure (see `figure`)."""

from typing import Any

from megatron_async.schedules.actions import Action, Backward, Forward, Reduce, Schedule, Update
from megatron_async.schedules.dependencies import number_of
from megatron_async.schedules.figure import to_figure, to_png, to_svg
from megatron_async.schedules.simulate import SimulationResult
from megatron_async.schedules.versions import gradient_delay

__all__ = ["to_figure", "to_json", "to_png", "to_svg", "to_text", "to_timeline", "to_trace"]

# Wider timelines are squeezed: very different times would otherwise make rows of millions of characters.
_MAX_COLUMNS = 4000
TIMELINE_LEGEND = "' reduction starts   ^ update   * both   . idle"
_TRACE_MICROSECONDS_PER_UNIT = 1000


def to_text(schedule: Schedule, result: SimulationResult) -> str:
    """Timeline and figures of merit for each stage, for a terminal."""
    shares = (
        f"bubble share: {result.steady_bubble_share:.2%} in steady state,"
        f" {result.bubble_share:.2%} with filling and draining; makespan {result.makespan:g}"
    )
    title = (
        f"schedule {schedule.name}: {schedule.stages} stages, {schedule.microbatches} micro-batches,"
        f" {schedule.batches} batches"
    )
    return "\n".join(
        [
            title,
            "",
            to_timeline(schedule, result),
            TIMELINE_LEGEND,
            "",
            *_stage_table(schedule, result),
            "",
            shares,
        ]
    )


def _stage_table(schedule: Schedule, result: SimulationResult) -> list[str]:
    header = ("stage", "bubble share", "live activations", "weight versions", "gradient delay")
    rows = [
        (
            str(rank),
            f"{1.0 - result.steady_busy_share[rank]:.2%}",
            f"{result.live_activations[rank]:g}",
            "+".join(map(str, result.weight_versions[rank])),
            "+".join(str(gradient_delay(schedule, rank, chunk)) for chunk in range(schedule.chunks)),
        )
        for rank in range(schedule.stages)
    ]
    return ["  ".join(cell.rjust(len(name)) for cell, name in zip(row, header, strict=True)) for row in [header, *rows]]


def to_timeline(schedule: Schedule, result: SimulationResult) -> str:
    """One row per rank, time to the right.

    A cell starts with F, B or U and the micro-batch or batch (`F0.3` with chunk if there are several) and is
    as long as its action; dots are idle time. The character before a cell shows the actions without length
    (see TIMELINE_LEGEND).
    """
    shortest = min(
        (end - start for row in result.spans for start, end in row if end > start),
        default=1.0,
    )
    widest = max(len(_label(schedule, action)) for row in schedule.actions for action in row)
    scale = min((widest + 1) / shortest, _MAX_COLUMNS / max(result.makespan, shortest))
    return "\n".join(
        f"rank {rank:<{len(str(schedule.stages - 1))}} |{_timeline_row(schedule, result, rank, scale)}"
        for rank in range(schedule.stages)
    )


def _timeline_row(schedule: Schedule, result: SimulationResult, rank: int, scale: float) -> str:
    columns = ["."] * (round(result.makespan * scale) + 1)
    marks: dict[int, str] = {}
    for action, (start, end) in zip(schedule.actions[rank], result.spans[rank], strict=True):
        first, stop = round(start * scale), round(end * scale)
        if stop > first:
            cell = " " + _label(schedule, action)[: stop - first - 1]
            columns[first:stop] = cell.ljust(stop - first, "-")
        elif isinstance(action, Reduce | Update):
            mark = "'" if isinstance(action, Reduce) else "^"
            marks[first] = mark if marks.get(first, mark) == mark else "*"
    for column, mark in marks.items():
        columns[column] = mark
    return "".join(columns).rstrip(".")


def _label(schedule: Schedule, action: Action) -> str:
    chunk = f"{action.chunk}." if schedule.chunks > 1 else ""
    return f"{action.kind}{chunk}{number_of(action)}"


def to_json(schedule: Schedule, result: SimulationResult) -> dict[str, Any]:
    """The table and its figures of merit as plain data.

    `bubble_share` is the steady-state share (see SimulationResult). For schedules with several chunks per
    rank `weight_versions` and `gradient_delay` are those of the worst chunk.
    """
    return {
        "schedule": schedule.name,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "batches": schedule.batches,
        "bubble_share": result.steady_bubble_share,
        "stage": [
            {
                "live_activations": result.live_activations[rank],
                "weight_versions": max(result.weight_versions[rank]),
                "gradient_delay": max(gradient_delay(schedule, rank, chunk) for chunk in range(schedule.chunks)),
                "actions": [_action_fields(action) for action in row],
            }
            for rank, row in enumerate(schedule.actions)
        ],
    }


def _action_fields(action: Action) -> dict[str, str | int]:
    fields: dict[str, str | int] = {"action": action.kind, "chunk": action.chunk}
    if isinstance(action, Forward | Backward):
        return fields | {"microbatch": action.microbatch, "version": action.version}
    return fields | {"batch": action.batch}


def to_trace(schedule: Schedule, result: SimulationResult) -> dict[str, Any]:
    """Chrome trace event format (about:tracing, Perfetto): one thread per rank, one unit of time = 1 ms."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": f"schedule {schedule.name}"}}
    ]
    for rank, row in enumerate(schedule.actions):
        thread = {"pid": 0, "tid": rank}
        events.append({"ph": "M", **thread, "name": "thread_name", "args": {"name": f"rank {rank}"}})
        for action, (start, end) in zip(row, result.spans[rank], strict=True):
            event = {
                **thread,
                "name": str(action),
                "cat": action.kind,
                "ts": start * _TRACE_MICROSECONDS_PER_UNIT,
                "args": _action_fields(action),
            }
            if isinstance(action, Reduce):
                events.append({"ph": "i", "s": "t", **event})
            else:
                events.append({"ph": "X", "dur": (end - start) * _TRACE_MICROSECONDS_PER_UNIT, **event})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
