# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A simulated table as text, JSON, Chrome trace or picture."""

from typing import Any

from megatron_async.schedules.actions import Action, Compute, Reduce, Schedule, Update
from megatron_async.schedules.figure import to_figure, to_image
from megatron_async.schedules.simulate import SimulationResult
from megatron_async.schedules.versions import gradient_delay

__all__ = ["to_figure", "to_image", "to_json", "to_text", "to_timeline", "to_trace"]

# Limits the width where the times of the actions are very different.
_MAX_COLUMNS = 4000
_LEGEND = "' reduction starts   ^ update   * both   . idle"
_TRACE_MICROSECONDS_PER_UNIT = 1000


def to_text(schedule: Schedule, result: SimulationResult) -> str:
    """Timeline and a summary of each stage, for a terminal."""
    return (
        f"schedule {schedule.name}: {schedule.stages} stages, {schedule.microbatches} micro-batches,"
        f" {schedule.batches} batches\n\n{to_timeline(schedule, result)}\n{_LEGEND}\n\n"
        f"{_stage_table(schedule, result)}\n\nbubble share: {result.steady_bubble_share:.2%} in steady state,"
        f" {result.bubble_share:.2%} with filling and draining; makespan {result.makespan:g}"
    )


def _stage_table(schedule: Schedule, result: SimulationResult) -> str:
    header = ("stage", "bubble share", "live activations", "weight versions", "gradient delay")
    rows = [header] + [
        (
            str(rank),
            f"{1.0 - result.steady_busy_share[rank]:.2%}",
            f"{result.live_activations[rank]:g}",
            "+".join(map(str, result.weight_versions[rank])),
            "+".join(str(gradient_delay(schedule, rank, chunk)) for chunk in range(schedule.chunks)),
        )
        for rank in range(schedule.stages)
    ]
    widths = [len(name) for name in header]
    return "\n".join("  ".join(map(str.rjust, row, widths)) for row in rows)


def to_timeline(schedule: Schedule, result: SimulationResult) -> str:
    """One row per rank, time to the right.

    A cell starts with F, B or U and the micro-batch or batch (`F0.3` with the chunk if there are several); its length
    is the time of the action. The character before a cell marks actions without length (see the legend of `to_text`).
    """
    shortest = result.shortest
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
    return f"{action.kind}{chunk}{action.number}"


def to_json(schedule: Schedule, result: SimulationResult) -> dict[str, Any]:
    """The table and its summary as plain data.

    `bubble_share` is the steady-state share. `weight_versions` and `gradient_delay` are the largest of all chunks.
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
    if isinstance(action, Compute):
        return fields | {"microbatch": action.microbatch, "version": action.version}
    return fields | {"batch": action.batch}


def to_trace(schedule: Schedule, result: SimulationResult) -> dict[str, Any]:
    """Chrome trace event format (chrome://tracing, Perfetto): one thread per rank, one unit of time = 1 ms."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": f"schedule {schedule.name}"}}
    ]
    for rank, row in enumerate(schedule.actions):
        thread = {"pid": 0, "tid": rank}
        events.append({"ph": "M", **thread, "name": "thread_name", "args": {"name": f"rank {rank}"}})
        for action, (start, end) in zip(row, result.spans[rank], strict=True):
            duration = (end - start) * _TRACE_MICROSECONDS_PER_UNIT
            shape = {"ph": "i", "s": "t"} if isinstance(action, Reduce) else {"ph": "X", "dur": duration}
            labels = {"name": str(action), "cat": action.kind, "ts": start * _TRACE_MICROSECONDS_PER_UNIT}
            events.append({**shape, **thread, **labels, "args": _action_fields(action)})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
