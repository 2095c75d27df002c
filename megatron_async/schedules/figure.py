# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A simulated table as a picture. Matplotlib is imported only here, and only when a picture is asked for."""

import colorsys
import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from megatron_async.schedules.actions import Action, Backward, Forward, Reduce, Schedule, Update
from megatron_async.schedules.dependencies import number_of
from megatron_async.schedules.simulate import SimulationResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Color = tuple[float, float, float]

# Hues of consecutive batches (turns), far from each other for neighbors.
_HUES = (0.58, 0.07, 0.38, 0.90, 0.14, 0.75)
_INK = (0.13, 0.14, 0.17)
_IDLE = (0.93, 0.93, 0.94)
_ROW = 0.84
_STRIPE_OFFSET = 0.31
_FONT_SIZE = 8.0
_POINTS_PER_INCH = 72


def _batch_color(batch: int, *, strong: bool) -> Color:
    hue = _HUES[batch % len(_HUES)]
    return colorsys.hls_to_rgb(hue, 0.44, 0.52) if strong else colorsys.hls_to_rgb(hue, 0.80, 0.62)


def to_figure(schedule: Schedule, result: SimulationResult) -> "Figure":
    """Matplotlib figure: one row per rank, time to the right.

    Light cells are forwards, dark cells backwards, one hue per batch, the micro-batch number inside; a white
    stripe marks chunk 1. A dark line or cell is an update, a small triangle under the row a reduction, pale gray
    idle.
    """
    from matplotlib.figure import Figure

    shortest = min((end - start for row in result.spans for start, end in row if end > start), default=1.0)
    axes_width = min(max(0.24 * result.makespan / shortest, 8.0), 30.0)
    figure = Figure(figsize=(axes_width + 1.2, 0.42 * schedule.stages + 1.9), layout="constrained")
    axes = figure.add_subplot()
    _draw_cells(axes, schedule, result)
    _draw_marks(axes, schedule, result)
    _write_numbers(axes, schedule, result, axes_width * _POINTS_PER_INCH)
    _decorate(axes, schedule, result)
    _add_legend(figure, schedule)
    return figure


def _rectangle(start: float, end: float, middle: float, height: float) -> list[tuple[float, float]]:
    top, bottom = middle - height / 2, middle + height / 2
    return [(start, top), (end, top), (end, bottom), (start, bottom)]


def _timed(schedule: Schedule, result: SimulationResult) -> Iterator[tuple[int, Action, float, float]]:
    """Rank, action, start and end of everything in the table."""
    for rank, (row, spans) in enumerate(zip(schedule.actions, result.spans, strict=True)):
        for action, (start, end) in zip(row, spans, strict=True):
            yield rank, action, start, end


def _cell_color(schedule: Schedule, action: Action) -> Color:
    if isinstance(action, Forward | Backward):
        return _batch_color(schedule.batch_of(action.microbatch), strong=isinstance(action, Backward))
    return _INK


def _draw_cells(axes: "Axes", schedule: Schedule, result: SimulationResult) -> None:
    """Idle rows, the actions that take time, and the stripes of chunk 1: one collection each, for speed."""
    from matplotlib.collections import PolyCollection

    idle = [_rectangle(0.0, result.makespan, rank, _ROW) for rank in range(schedule.stages)]
    axes.add_collection(PolyCollection(idle, facecolors=[_IDLE], zorder=0))
    cells = [timed for timed in _timed(schedule, result) if timed[3] > timed[2]]
    axes.add_collection(
        PolyCollection(
            [_rectangle(start, end, rank, _ROW) for rank, _, start, end in cells],
            facecolors=[_cell_color(schedule, action) for _, action, _, _ in cells],
            edgecolors="white",
            linewidths=0.6,
            zorder=2,
        )
    )
    stripes = [
        _rectangle(start, end, rank - _STRIPE_OFFSET, 0.07)
        for rank, action, start, end in cells
        if action.chunk > 0 and not isinstance(action, Update)
    ]
    axes.add_collection(PolyCollection(stripes, facecolors="white", zorder=3))


def _draw_marks(axes: "Axes", schedule: Schedule, result: SimulationResult) -> None:
    timed = list(_timed(schedule, result))
    updates = [(end, rank) for rank, action, start, end in timed if isinstance(action, Update) and start == end]
    axes.vlines(
        [time for time, _ in updates],
        [rank - _ROW / 2 - 0.06 for _, rank in updates],
        [rank + _ROW / 2 + 0.06 for _, rank in updates],
        colors=[_INK],
        linewidth=2,
        zorder=4,
    )
    reductions = [(end, rank) for rank, action, _, end in timed if isinstance(action, Reduce)]
    axes.plot(
        [time for time, _ in reductions],
        [rank + _ROW / 2 + 0.02 for _, rank in reductions],
        linestyle="none",
        marker="^",
        markersize=4,
        color=_INK,
        clip_on=False,
        zorder=4,
    )


def _write_numbers(axes: "Axes", schedule: Schedule, result: SimulationResult, width: float) -> None:
    """The number of each cell that is wide enough for it; `width` of the axes in points."""
    for rank, action, start, end in _timed(schedule, result):
        text = f"U{action.batch}" if isinstance(action, Update) else str(number_of(action))
        # A digit is about 0.6 of the font size wide.
        if end > start and (end - start) / result.makespan * width >= 0.6 * _FONT_SIZE * len(text):
            color = _INK if isinstance(action, Forward) else "white"
            axes.text((start + end) / 2, rank, text, ha="center", va="center", size=_FONT_SIZE, color=color, zorder=5)


def _decorate(axes: "Axes", schedule: Schedule, result: SimulationResult) -> None:
    # A little room on the right, or the marks at the very end are cut in half.
    axes.set_xlim(0, 1.005 * result.makespan if result.makespan > 0 else 1.0)
    axes.set_ylim(schedule.stages - 0.4, -0.6)
    axes.set_yticks(range(schedule.stages), [f"rank {rank}" for rank in range(schedule.stages)])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("time")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_title(
        f"{schedule.name}: {schedule.stages} stages, {schedule.microbatches} micro-batches per batch,"
        f" {schedule.batches} batches. Bubble {result.steady_bubble_share:.1%} in steady state,"
        f" {result.bubble_share:.1%} in all",
        loc="left",
        fontsize=11,
    )


def _add_legend(figure: "Figure", schedule: Schedule) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    light, dark = (Patch(facecolor=_batch_color(0, strong=strong)) for strong in (False, True))
    # Any: matplotlib's annotations do not know handles that are tuples.
    entries: list[tuple[str, Any]] = [
        ("forward", light),
        ("backward", dark),
    ]
    if schedule.chunks > 1:
        entries.append(("chunk 1", (dark, Line2D([], [], color="white", lw=1.5))))
    entries += [
        ("update", Line2D([], [], color=_INK, lw=0, marker="|", markersize=11, markeredgewidth=2)),
        ("reduction starts", Line2D([], [], color=_INK, lw=0, marker="^", markersize=5)),
        ("idle", Patch(facecolor=_IDLE)),
    ]
    figure.legend(
        [handle for _, handle in entries],
        [label for label, _ in entries],
        ncols=len(entries),
        loc="outside lower left",
        frameon=False,
        fontsize=9,
        handlelength=1.4,
        handler_map={tuple: HandlerTuple(ndivide=1)},
    )


def to_png(schedule: Schedule, result: SimulationResult) -> bytes:
    """The figure as a PNG file."""
    return _save(schedule, result, "png")


def to_svg(schedule: Schedule, result: SimulationResult) -> str:
    """The figure as an SVG file; the same table always gives the same text."""
    return _save(schedule, result, "svg").decode()


def _save(schedule: Schedule, result: SimulationResult, file_format: Literal["png", "svg"]) -> bytes:
    from matplotlib import rc_context

    buffer = io.BytesIO()
    with rc_context({"svg.hashsalt": schedule.name, "svg.fonttype": "none"}):
        to_figure(schedule, result).savefig(
            buffer, format=file_format, dpi=120, metadata={"Date": None} if file_format == "svg" else None
        )
    return buffer.getvalue()
