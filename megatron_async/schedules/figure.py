# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A simulated table as a picture. Matplotlib is imported only here, and only when a picture is asked for."""

import colorsys
import io
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
_POINTS_PER_INCH = 72


def _batch_color(batch: int, *, strong: bool) -> Color:
    hue = _HUES[batch % len(_HUES)]
    return colorsys.hls_to_rgb(hue, 0.44, 0.52) if strong else colorsys.hls_to_rgb(hue, 0.80, 0.62)


def to_figure(schedule: Schedule, result: SimulationResult) -> "Figure":
    """Matplotlib figure: one row per rank, time to the right.

    Light cells are forwards, dark cells backwards, one hue per batch, the micro-batch number inside; a white
    stripe marks chunk 1. A dark line or cell is an update, a small triangle under the row a reduction, pale
    gray idle.
    """
    from matplotlib.figure import Figure

    shortest = min((end - start for row in result.spans for start, end in row if end > start), default=1.0)
    axes_width = min(max(0.24 * result.makespan / shortest, 8.0), 30.0)
    figure = Figure(figsize=(axes_width + 1.2, 0.42 * schedule.stages + 1.9), layout="constrained")
    axes = figure.add_subplot()
    points_per_unit = axes_width * _POINTS_PER_INCH / result.makespan if result.makespan > 0 else 0.0
    for rank, row in enumerate(schedule.actions):
        axes.barh(rank, result.makespan, height=_ROW, color=_IDLE, linewidth=0, zorder=0)
        for action, span in zip(row, result.spans[rank], strict=True):
            _draw(axes, schedule, rank, action, span, points_per_unit)
    _decorate(axes, schedule, result)
    _add_legend(figure, schedule)
    return figure


def _draw(
    axes: "Axes",
    schedule: Schedule,
    rank: int,
    action: Action,
    span: tuple[float, float],
    points_per_unit: float,
) -> None:
    start, end = span
    match action:
        case Reduce():
            axes.plot(
                [end], [rank + _ROW / 2 + 0.02], marker="^", markersize=4, color=_INK, clip_on=False, zorder=4
            )
        case Update() if end == start:
            axes.plot(
                [end, end], [rank - _ROW / 2 - 0.06, rank + _ROW / 2 + 0.06], color=_INK, lw=2, zorder=4
            )
        case Update():
            axes.barh(
                rank, end - start, left=start, height=_ROW, color=_INK, edgecolor="white", linewidth=0.6
            )
            _write(axes, rank, span, f"U{action.batch}", "white", points_per_unit)
        case Forward() | Backward():
            backward = isinstance(action, Backward)
            axes.barh(
                rank,
                end - start,
                left=start,
                height=_ROW,
                color=_batch_color(schedule.batch_of(action.microbatch), strong=backward),
                edgecolor="white",
                linewidth=0.6,
                zorder=2,
            )
            if action.chunk > 0:
                axes.barh(
                    rank - _STRIPE_OFFSET, end - start, left=start, height=0.07, color="white", zorder=3
                )
            _write(axes, rank, span, str(number_of(action)), "white" if backward else _INK, points_per_unit)


def _write(
    axes: "Axes", rank: int, span: tuple[float, float], text: str, color: str | Color, points_per_unit: float
) -> None:
    size = 8.0
    # A digit is about 0.6 of the font size wide.
    if (span[1] - span[0]) * points_per_unit >= 0.6 * size * len(text):
        axes.text(sum(span) / 2, rank, text, ha="center", va="center", size=size, color=color, zorder=5)


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
