# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Reads what runs write (metrics files, Chrome traces) and turns it into numbers and pictures."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatron_async import files

Row = Mapping[str, Any]

WARMUP_ITERATIONS = 10
"""Iterations left out of timings: the first pay for allocations, and a delayed pipeline is still filling."""

SMOOTHING = 0.8
"""Weight of the past in the smoothed loss: about five iterations count."""

_RUN_COLORS = ("#4c566a", "#d08770", "#2e7d6b", "#5e81ac", "#b48ead", "#a3791b")
_KIND_COLORS = {"F": "#7aa6d8", "B": "#e8b06a", "U": "#6bb38a"}
_KIND_NAMES = {"F": "forward", "B": "backward", "U": "update"}


@dataclass(frozen=True, slots=True)
class Metrics:
    """One metrics file, rows in the order of the file."""

    config: Row
    """Resolved arguments and versions; empty if the run has not written them yet."""
    training: tuple[Row, ...]
    """One row per completed batch; has at least `iteration` and `lm_loss`."""
    validation: tuple[Row, ...]
    """One row per evaluation: `iteration`, `valid_loss`."""

    def losses(self) -> tuple[list[int], list[float]]:
        """Iterations and training losses (nats per token)."""
        return [row["iteration"] for row in self.training], [row["lm_loss"] for row in self.training]

    def validation_losses(self) -> tuple[list[int], list[float]]:
        """Iterations and validation losses (nats per token)."""
        return [row["iteration"] for row in self.validation], [row["valid_loss"] for row in self.validation]


@dataclass(frozen=True, slots=True)
class Span:
    """One box of a pipeline timeline; times in milliseconds."""

    stage: int
    kind: str
    """F, B or U."""
    batch: int
    microbatch: int | None
    start: float
    duration: float

    @property
    def end(self) -> float:
        return self.start + self.duration


def parse_metrics(text: str, source: str = "metrics") -> Metrics:
    """Sorts the lines of a metrics file into rows.

    A last line without its newline is still being written and is left out.

    Raises:
        ValueError: a complete line is no JSON object, or is of no known kind; the message has `source` and
            the line's number.
    """
    config: Row = {}
    training: list[Row] = []
    validation: list[Row] = []
    for place, row in files.parse_json_lines(text, source):
        match row:
            case {"config": dict(found)}:
                config = found
            case {"iteration": int(), "lm_loss": _}:
                training.append(row)
            case {"iteration": int(), "valid_loss": _}:
                validation.append(row)
            case _:
                raise ValueError(
                    f"{place}: expected `config`, or `iteration` with `lm_loss` or `valid_loss`, got {str(row)[:80]}"
                )
    return Metrics(config, tuple(training), tuple(validation))


def read_metrics(path: Path | str) -> Metrics:
    """A metrics file as it is now, of a finished run or one that is still writing.

    Raises:
        FileNotFoundError: no such file.
        ValueError: as `parse_metrics`.
    """
    return parse_metrics(Path(path).read_text(encoding="utf-8"), str(path))


def median_ms(metrics: Metrics, warmup: int = WARMUP_ITERATIONS) -> float:
    """Median time of a batch in milliseconds, without the first `warmup` iterations (half of a shorter run).

    Raises:
        ValueError: the file holds no training row.
    """
    if not metrics.training:
        raise ValueError("no training rows: the run completed no batch, so it has no time per batch")
    skip = min(warmup, len(metrics.training) // 2)
    return statistics.median(row["iteration_ms"] for row in metrics.training[skip:])


def final_valid_loss(metrics: Metrics) -> float:
    """Loss of the last evaluation, in nats per token.

    Raises:
        ValueError: the file holds no validation row.
    """
    if not metrics.validation:
        raise ValueError("no validation rows: the run made no evaluation (see --eval-interval and --eval-iters)")
    return float(metrics.validation[-1]["valid_loss"])


def summary(
    runs: Mapping[str, Metrics], *, stages: int, microbatches: int, warmup: int = WARMUP_ITERATIONS
) -> dict[str, Any]:
    """The content of `summary.json`: for each run its time per batch (ms, median) and validation loss."""
    return {
        "runs": {
            name: {"ms_per_batch": median_ms(metrics, warmup), "valid_loss": final_valid_loss(metrics)}
            for name, metrics in runs.items()
        },
        "stages": stages,
        "microbatches": microbatches,
    }


def smoothed(values: Sequence[float], weight: float = SMOOTHING) -> list[float]:
    """Exponential moving average, corrected for its start at zero as in Adam (arXiv 1412.6980)."""
    average, result = 0.0, []
    for count, value in enumerate(values, start=1):
        average = weight * average + (1 - weight) * value
        result.append(average / (1 - weight**count))
    return result


def validation_gaps(runs: Mapping[str, Metrics], reference: str) -> dict[str, list[tuple[int, float]]]:
    """Validation loss of each other run minus the reference's where both evaluated: (iteration, gap in nats).

    Raises:
        ValueError: `reference` is none of the runs.
    """
    if reference not in runs:
        raise ValueError(f"reference {reference!r} is none of the runs given: {', '.join(runs)}")
    base = dict(zip(*runs[reference].validation_losses(), strict=True))
    return {
        name: [
            (iteration, loss - base[iteration])
            for iteration, loss in zip(*metrics.validation_losses(), strict=True)
            if iteration in base
        ]
        for name, metrics in runs.items()
        if name != reference
    }


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a picture atomically; the file's suffix (.png, .svg, .pdf) chooses the format."""
    with files.replacing(path) as partial:
        figure.savefig(partial, dpi=160)


def _figure(width: float, height: float) -> Figure:
    """An empty picture (size in inches) without pyplot, whose state is global and wants a display."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e5e9f0", linewidth=0.8)
    axes.set_axisbelow(True)


def loss_figure(runs: Mapping[str, Metrics], title: str = "Loss") -> Figure:
    """Training loss of each run (faint, with its moving average) and its validation points."""
    figure = _figure(8.0, 4.8)
    axes = figure.add_subplot()
    for index, (name, metrics) in enumerate(runs.items()):
        color = _RUN_COLORS[index % len(_RUN_COLORS)]
        iterations, losses = metrics.losses()
        axes.plot(iterations, losses, color=color, alpha=0.2, linewidth=0.8)
        axes.plot(iterations, smoothed(losses), color=color, linewidth=1.6, label=name)
        points, values = metrics.validation_losses()
        axes.plot(points, values, "o", color=color, markersize=6, markeredgecolor="white")
    axes.plot([], [], "o", color="#4c566a", markeredgecolor="white", label="validation")
    axes.set(xlabel="iteration (batches)", ylabel="loss (nats per token)", title=title)
    _tidy(axes)
    axes.legend(frameon=False)
    return figure


def gap_figure(runs: Mapping[str, Metrics], reference: str) -> Figure:
    """Validation loss minus the reference's at the same iteration, one line per other run.

    Raises:
        ValueError: `reference` is none of the runs.
    """
    gaps = validation_gaps(runs, reference)
    figure = _figure(8.0, 4.2)
    axes = figure.add_subplot()
    axes.axhline(0.0, color="#4c566a", linewidth=1.0)
    for index, (name, points) in enumerate(gaps.items(), start=1):
        color = _RUN_COLORS[index % len(_RUN_COLORS)]
        axes.plot([i for i, _ in points], [g for _, g in points], "o-", color=color, markersize=4, label=name)
    axes.set(
        xlabel="iteration (batches)",
        ylabel="gap (nats per token)",
        title=f"Validation loss minus {reference}",
    )
    _tidy(axes)
    if gaps:
        axes.legend(frameon=False)
    return figure


def read_trace(path: Path | str) -> tuple[Span, ...]:
    """The computing boxes (F, B, U) of a pipeline timeline in Chrome's trace format, ordered by start.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file holds no such box.
    """
    events = json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]
    spans = [
        Span(
            stage=event["tid"],
            kind=event["args"]["kind"],
            batch=event["args"]["batch"],
            microbatch=event["args"].get("microbatch"),
            start=event["ts"] / 1000,
            duration=event["dur"] / 1000,
        )
        for event in events
        if event.get("ph") == "X" and event.get("args", {}).get("kind") in _KIND_COLORS
    ]
    if not spans:
        raise ValueError(f"{path}: no forward, backward or update in the trace")
    return tuple(sorted(spans, key=lambda span: span.start))


def steady_window(spans: Sequence[Span], batches: int) -> tuple[float, float]:
    """Start and end (ms) of `batches` batches from the middle of a trace, away from filling and draining.

    Measured on stage 0 from the first forward of one batch to the first forward `batches` batches later, so
    in the steady state it is a whole number of periods whatever the schedule. A shorter trace is taken whole.
    """
    starts: dict[int, float] = {}
    for span in spans:
        if span.stage == 0 and span.kind == "F":
            starts[span.batch] = min(span.start, starts.get(span.batch, span.start))
    ordered = sorted(starts)
    if len(ordered) <= batches + 1:
        return min(span.start for span in spans), max(span.end for span in spans)
    first = (len(ordered) - batches) // 2
    return starts[ordered[first]], starts[ordered[first + batches]]


def idle_share(spans: Sequence[Span], stage: int, window: tuple[float, float]) -> float:
    """Share of the window (start, end in ms) in which the stage computes nothing; 0 to 1."""
    start, end = window
    busy, reached = 0.0, start
    for span in sorted((span for span in spans if span.stage == stage), key=lambda span: span.start):
        left, right = max(span.start, reached), min(span.end, end)
        if right > left:
            busy += right - left
            reached = right
    return 1.0 - busy / (end - start)


def timeline_figure(traces: Mapping[str, Sequence[Span]], batches: int = 3) -> Figure:
    """What each stage computes over some batches of the steady state; a panel per trace, one time scale."""
    windows = {name: steady_window(spans, batches) for name, spans in traces.items()}
    width = max(end - start for start, end in windows.values())
    stages = max(span.stage for spans in traces.values() for span in spans) + 1
    figure = _figure(10.0, 0.9 + len(traces) * (0.7 + 0.55 * stages))
    panels = figure.subplots(len(traces), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, spans) in zip(panels, traces.items(), strict=True):
        _draw_timeline(axes, spans, windows[name], width)
        period = (windows[name][1] - windows[name][0]) / batches
        axes.set_title(f"{name}: {period:.0f} ms per batch", loc="left", fontsize=10)
    panels[-1].set_xlabel("time (ms); numbers are micro-batches, light and dark shades alternate by batch")
    handles = [Patch(color=color, label=_KIND_NAMES[kind]) for kind, color in _KIND_COLORS.items()]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), frameon=False)
    return figure


def _draw_timeline(axes: Axes, spans: Sequence[Span], window: tuple[float, float], width: float) -> None:
    """Draws the spans of the first `width` ms from the window's start; labels boxes that are wide enough."""
    origin = window[0]
    stages = sorted({span.stage for span in spans})
    for span in spans:
        if span.end <= origin or span.start >= origin + width:
            continue
        left, right = max(span.start - origin, 0.0), min(span.end - origin, width)
        axes.barh(
            span.stage,
            right - left,
            left=left,
            height=0.8,
            color=_KIND_COLORS[span.kind],
            alpha=1.0 if span.batch % 2 else 0.65,
            edgecolor="white",
            linewidth=0.6,
        )
        if span.microbatch is not None and right - left > width / 60:
            label = str(span.microbatch)
            axes.text((left + right) / 2, span.stage, label, ha="center", va="center", fontsize=7)
    idle = [f"stage {stage}\nidle {idle_share(spans, stage, window):.0%}" for stage in stages]
    axes.set_yticks(stages, idle, fontsize=8)
    axes.set_xlim(0.0, width)
    axes.invert_yaxis()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
