# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Actions in time as a picture. Matplotlib is imported only here, when a picture is drawn."""

import colorsys
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from megatron_async.schedules.actions import Action, Compute, Schedule
from megatron_async.schedules.simulate import SimulationResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Hues of consecutive batches.
_HUES = (0.58, 0.07, 0.38, 0.90, 0.14, 0.75)
_INK = (0.13, 0.14, 0.17)
_IDLE = (0.93, 0.93, 0.94)
_ROW = 0.84
_FONT_SIZE = 8.0
_POINTS_PER_INCH = 72


@dataclass(frozen=True, slots=True)
class Span:
    """An action in time: F, B, R or U of a rank.

    Attributes:
        number: of the micro-batch, or of the batch for R and U.
        start, end: in any unit.
    """

    rank: int
    kind: str
    batch: int
    number: int
    start: float
    end: float
    chunk: int = 0


def spans_of(schedule: Schedule, result: SimulationResult) -> list[Span]:
    """Every action of a simulated table."""
    return [
        Span(rank, action.kind, _batch(schedule, action), action.number, start, end, action.chunk)
        for rank, (row, times) in enumerate(zip(schedule.actions, result.spans, strict=True))
        for action, (start, end) in zip(row, times, strict=True)
    ]


def _batch(schedule: Schedule, action: Action) -> int:
    return schedule.batch_of(action.microbatch) if isinstance(action, Compute) else action.number


def to_figure(schedule: Schedule, result: SimulationResult) -> "Figure":
    """Matplotlib figure of a table; see `draw`. Updates without length are dark lines."""
    from matplotlib.figure import Figure

    axes_width = min(max(0.24 * result.makespan / result.shortest, 8.0), 30.0)
    figure = Figure(figsize=(axes_width + 1.2, 0.42 * schedule.stages + 1.9), layout="constrained")
    axes, spans = figure.add_subplot(), spans_of(schedule, result)
    idle = [(rank, 0.0, result.makespan) for rank in range(schedule.stages)]
    _draw_rectangles(axes, idle, facecolors=[_IDLE], zorder=0, label="idle")
    axes.set_xlim(0, 1.005 * result.makespan if result.makespan > 0 else 1.0)
    draw(axes, spans, [f"rank {rank}" for rank in range(schedule.stages)], axes_width)
    updates = [(span.end, span.rank) for span in spans if span.kind == "U" and span.start == span.end]
    reductions = [(span.end, span.rank + _ROW / 2 + 0.02) for span in spans if span.kind == "R"]
    _draw_marks(axes, updates, label="update", marker="|", s=700, linewidths=2)
    _draw_marks(axes, reductions, label="reduction starts", marker="^", s=20)
    axes.set_xlabel("time (white stripe: chunk 1)" if schedule.chunks > 1 else "time")
    axes.set_title(
        f"{schedule.name}: {schedule.stages} stages, {schedule.microbatches} micro-batches per batch,"
        f" {schedule.batches} batches. Bubble {result.steady_bubble_share:.1%} in steady state,"
        f" {result.bubble_share:.1%} in all",
        loc="left",
        fontsize=11,
    )
    figure.legend(ncols=6, loc="outside lower left", frameon=False, fontsize=9, handlelength=1.4, markerscale=0.6)
    return figure


def draw(axes: "Axes", spans: Sequence[Span], rows: Sequence[str], width: float) -> None:
    """Draw spans that take time: one row per rank, time to the right, one hue per batch, numbers where there is room.

    Light cells are forwards, dark cells backwards, black ones updates; a white stripe marks chunk 1.

    Args:
        axes: with their limits of time.
        rows: label of each rank.
        width: of the axes in inches.
    """
    left, right = axes.get_xlim()
    for label, kind in (("forward", "F"), ("backward", "B"), ("update", "U")):
        if cells := [span for span in spans if span.kind == kind and span.end > span.start]:
            rectangles, colors = [(span.rank, span.start, span.end) for span in cells], [_color(span) for span in cells]
            style: dict[str, Any] = {"facecolors": colors, "edgecolors": "white", "linewidths": 0.6, "zorder": 2}
            _draw_rectangles(axes, rectangles, label=label, **style)
            _write_numbers(axes, cells, width * _POINTS_PER_INCH / (right - left))
    stripes = [(span.rank - 0.31, span.start, span.end) for span in spans if span.kind in "FB" and span.chunk]
    _draw_rectangles(axes, stripes, height=0.07, facecolors="white", zorder=3)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _color(span: Span) -> tuple[float, float, float]:
    if span.kind == "U":
        return _INK
    hue = _HUES[span.batch % len(_HUES)]
    return colorsys.hls_to_rgb(hue, *((0.44, 0.52) if span.kind == "B" else (0.80, 0.62)))


def _draw_rectangles(
    axes: "Axes", rectangles: Iterable[tuple[float, float, float]], *, height: float = _ROW, **style: Any
) -> None:
    """Draw (middle, start, end) in one collection, for speed."""
    from matplotlib.collections import PolyCollection

    half = height / 2
    corners = [
        [(start, middle - half), (end, middle - half), (end, middle + half), (start, middle + half)]
        for middle, start, end in rectangles
    ]
    axes.add_collection(PolyCollection(corners, **style))


def _draw_marks(axes: "Axes", points: Sequence[tuple[float, float]], **style: Any) -> None:
    if points:
        times, heights = zip(*points, strict=True)
        axes.scatter(times, heights, color=_INK, clip_on=False, zorder=4, **style)


def _write_numbers(axes: "Axes", cells: Iterable[Span], points_per_time: float) -> None:
    """Write the number of each cell that is wide enough."""
    for span in cells:
        text = f"U{span.number}" if span.kind == "U" else str(span.number)
        # A digit is about 0.6 of the font size wide.
        if (span.end - span.start) * points_per_time >= 0.6 * _FONT_SIZE * len(text):
            middle, color = (span.start + span.end) / 2, _INK if span.kind == "F" else "white"
            place: dict[str, Any] = {"ha": "center", "va": "center", "zorder": 5, "clip_on": True}
            axes.text(middle, span.rank, text, color=color, size=_FONT_SIZE, **place)


def to_image(schedule: Schedule, result: SimulationResult, file_format: Literal["png", "svg"]) -> bytes:
    """The figure as a PNG or SVG file. The contents are deterministic."""
    from matplotlib import rc_context

    buffer = io.BytesIO()
    metadata = {"Date": None} if file_format == "svg" else None
    with rc_context({"svg.hashsalt": schedule.name, "svg.fonttype": "none"}):
        to_figure(schedule, result).savefig(buffer, format=file_format, dpi=120, metadata=metadata)
    return buffer.getvalue()
