# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A simulated table as a picture. Matplotlib is imported only here, when a picture is drawn."""

import colorsys
import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from megatron_async.schedules.actions import Action, Backward, Compute, Forward, Reduce, Schedule, Update
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


def to_figure(schedule: Schedule, result: SimulationResult) -> "Figure":
    """Matplotlib figure: one row per rank, time to the right, one hue per batch.

    Light cells are forwards, dark cells backwards; a white stripe marks chunk 1. Updates without length are dark lines.
    """
    from matplotlib.figure import Figure

    axes_width = min(max(0.24 * result.makespan / result.shortest, 8.0), 30.0)
    figure = Figure(figsize=(axes_width + 1.2, 0.42 * schedule.stages + 1.9), layout="constrained")
    axes = figure.add_subplot()
    timed = [
        (rank, action, start, end)
        for rank, (row, spans) in enumerate(zip(schedule.actions, result.spans, strict=True))
        for action, (start, end) in zip(row, spans, strict=True)
    ]
    idle = [(rank, 0.0, result.makespan) for rank in range(schedule.stages)]
    _draw_rectangles(axes, idle, facecolors=[_IDLE], zorder=0, label="idle")
    points_per_time = axes_width * _POINTS_PER_INCH / result.makespan if result.makespan > 0 else 0.0
    for label, kind in (("forward", Forward), ("backward", Backward), ("update", Update)):
        if cells := [cell for cell in timed if isinstance(cell[1], kind) and cell[3] > cell[2]]:
            spans = [(rank, start, end) for rank, _, start, end in cells]
            colors = [_cell_color(schedule, action) for _, action, _, _ in cells]
            _draw_rectangles(axes, spans, facecolors=colors, label=label, edgecolors="white", linewidths=0.6, zorder=2)
            _write_numbers(axes, cells, points_per_time)
    chunks = [cell for cell in timed if isinstance(cell[1], Compute) and cell[1].chunk]
    stripes = [(rank - 0.31, start, end) for rank, _, start, end in chunks]
    _draw_rectangles(axes, stripes, height=0.07, facecolors="white", zorder=3)
    updates = [(end, rank) for rank, action, start, end in timed if isinstance(action, Update) and start == end]
    reductions = [(end, rank + _ROW / 2 + 0.02) for rank, action, _, end in timed if isinstance(action, Reduce)]
    _draw_marks(axes, updates, label="update", marker="|", s=700, linewidths=2)
    _draw_marks(axes, reductions, label="reduction starts", marker="^", s=20)
    _decorate(axes, schedule, result)
    figure.legend(ncols=6, loc="outside lower left", frameon=False, fontsize=9, handlelength=1.4, markerscale=0.6)
    return figure


def _cell_color(schedule: Schedule, action: Action) -> tuple[float, float, float]:
    if not isinstance(action, Compute):
        return _INK
    hue = _HUES[schedule.batch_of(action.microbatch) % len(_HUES)]
    return colorsys.hls_to_rgb(hue, *((0.44, 0.52) if isinstance(action, Backward) else (0.80, 0.62)))


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


def _write_numbers(axes: "Axes", cells: Iterable[tuple[int, Action, float, float]], points_per_time: float) -> None:
    """Write the number of each cell that is wide enough."""
    for rank, action, start, end in cells:
        text = f"U{action.batch}" if isinstance(action, Update) else str(action.number)
        # A digit is about 0.6 of the font size wide.
        if (end - start) * points_per_time >= 0.6 * _FONT_SIZE * len(text):
            color = _INK if isinstance(action, Forward) else "white"
            axes.text((start + end) / 2, rank, text, ha="center", va="center", size=_FONT_SIZE, color=color, zorder=5)


def _decorate(axes: "Axes", schedule: Schedule, result: SimulationResult) -> None:
    axes.set_xlim(0, 1.005 * result.makespan if result.makespan > 0 else 1.0)
    axes.set_ylim(schedule.stages - 0.4, -0.6)
    axes.set_yticks(range(schedule.stages), [f"rank {rank}" for rank in range(schedule.stages)])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("time (white stripe: chunk 1)" if schedule.chunks > 1 else "time")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_title(
        f"{schedule.name}: {schedule.stages} stages, {schedule.microbatches} micro-batches per batch,"
        f" {schedule.batches} batches. Bubble {result.steady_bubble_share:.1%} in steady state,"
        f" {result.bubble_share:.1%} in all",
        loc="left",
        fontsize=11,
    )


def to_image(schedule: Schedule, result: SimulationResult, file_format: Literal["png", "svg"]) -> bytes:
    """The figure as a PNG or SVG file. The contents are deterministic."""
    from matplotlib import rc_context

    buffer = io.BytesIO()
    metadata = {"Date": None} if file_format == "svg" else None
    with rc_context({"svg.hashsalt": schedule.name, "svg.fonttype": "none"}):
        to_figure(schedule, result).savefig(buffer, format=file_format, dpi=120, metadata=metadata)
    return buffer.getvalue()
