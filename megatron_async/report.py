# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Reads the metrics files and traces of runs; summaries and pictures of them."""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_async import files
from megatron_async.schedules.figure import Span, draw

Row = Mapping[str, Any]

WARMUP_ITERATIONS = 10
"""Iterations left out of timings: the first ones allocate memory and fill the pipeline."""

SMOOTHING = 0.8
"""Weight of the past in the smoothed loss."""

_RUN_COLORS = ("#4c566a", "#d08770", "#2e7d6b", "#5e81ac", "#b48ead", "#a3791b")


@dataclass(frozen=True, slots=True)
class Metrics:
    """One metrics file, rows in the order of the file.

    Attributes:
        config: resolved arguments and versions; empty until the run has written them.
        training: one row per completed batch, with at least `iteration` and `lm_loss`.
        validation: one row per evaluation: `iteration`, `valid_loss`.
    """

    config: Row
    training: tuple[Row, ...]
    validation: tuple[Row, ...]

    def losses(self) -> dict[int, float]:
        """Training loss (nats per token) by iteration."""
        return {row["iteration"]: row["lm_loss"] for row in self.training}

    def validation_losses(self) -> dict[int, float]:
        """Validation loss (nats per token) by iteration."""
        return {row["iteration"]: row["valid_loss"] for row in self.validation}

    def seconds(self) -> dict[int, float]:
        """Seconds of training until each iteration was complete, without evaluations and saves."""
        times = accumulate(row["iteration_ms"] / 1e3 for row in self.training)
        return dict(zip(self.losses(), times, strict=True))


def parse_metrics(text: str, source: str = "metrics") -> Metrics:
    """Sort the lines of a metrics file into rows. A last line without its newline is left out: it is being written.

    Raises:
        ValueError: a complete line is no JSON object, or of no known kind; names `source` and the line.
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
            case {"iteration": int()} if any(name.startswith(("valid_loss-", "test_loss")) for name in row):
                pass  # several validation sets, the test set
            case _:
                raise ValueError(
                    f"{place}: expected `config`, or `iteration` with `lm_loss` or `valid_loss`, got {str(row)[:80]}"
                )
    return Metrics(config, tuple(training), tuple(validation))


def read_metrics(path: Path | str) -> Metrics:
    """The metrics file of a run, finished or not.

    Raises:
        FileNotFoundError: no such file.
        ValueError: see `parse_metrics`.
    """
    return parse_metrics(Path(path).read_text(encoding="utf-8"), str(path))


def median_ms(metrics: Metrics, warmup: int = WARMUP_ITERATIONS) -> float:
    """Median time of a batch in milliseconds, without the first `warmup` iterations (half of a shorter run).

    Raises:
        ValueError: the file has no training row.
    """
    if not metrics.training:
        raise ValueError("no training rows: the run completed no batch, so it has no time per batch")
    skip = min(warmup, len(metrics.training) // 2)
    return statistics.median(row["iteration_ms"] for row in metrics.training[skip:])


def final_valid_loss(metrics: Metrics) -> float:
    """Loss of the last evaluation, in nats per token.

    Raises:
        ValueError: the file has no validation row.
    """
    if not metrics.validation:
        raise ValueError("no validation rows: the run made no evaluation (see --eval-interval and --eval-iters)")
    return float(metrics.validation[-1]["valid_loss"])


def summary(
    runs: Mapping[str, Metrics], *, stages: int, microbatches: int, warmup: int = WARMUP_ITERATIONS
) -> dict[str, Any]:
    """The content of `summary.json`.

    Of each run the median time per batch (ms) and the validation loss; its state at equal time, the end of the fastest
    run.
    """
    equal_time = min(max(metrics.seconds().values()) for metrics in runs.values())
    return {
        "runs": {
            name: {"ms_per_batch": median_ms(metrics, warmup), "valid_loss": final_valid_loss(metrics)}
            for name, metrics in runs.items()
        },
        "stages": stages,
        "microbatches": microbatches,
        "equal_time": {
            "seconds": equal_time,
            "runs": {name: state_after(metrics, equal_time) for name, metrics in runs.items()},
        },
    }


def state_after(metrics: Metrics, seconds: float) -> dict[str, float]:
    """Batches that are complete after some seconds of training, and the training loss then.

    The loss is that of a line through the last ten batches, which lags behind a falling loss less than their mean.
    """
    batches = max(1, sum(time <= seconds for time in metrics.seconds().values()))
    losses = list(metrics.losses().values())[max(0, batches - 10) : batches]
    if len(losses) == 1:
        return {"batches": batches, "lm_loss": losses[0]}
    slope, intercept = statistics.linear_regression(range(len(losses)), losses)
    return {"batches": batches, "lm_loss": intercept + slope * (len(losses) - 1)}


def smoothed(values: Iterable[float], weight: float = SMOOTHING) -> list[float]:
    """Exponential moving average, corrected for its start at zero as in Adam (arXiv 1412.6980)."""
    average, result = 0.0, []
    for count, value in enumerate(values, start=1):
        average = weight * average + (1 - weight) * value
        result.append(average / (1 - weight**count))
    return result


def validation_gaps(runs: Mapping[str, Metrics], reference: str) -> dict[str, dict[int, float]]:
    """Validation loss of each other run minus the reference's (nats), by iteration, where both evaluated.

    Raises:
        ValueError: `reference` is none of the runs.
    """
    if reference not in runs:
        raise ValueError(f"reference {reference!r} is none of the runs given: {', '.join(runs)}")
    base = runs[reference].validation_losses()
    return {
        name: {step: loss - base[step] for step, loss in metrics.validation_losses().items() if step in base}
        for name, metrics in runs.items()
        if name != reference
    }


def training_gaps(runs: Mapping[str, Metrics], reference: str) -> dict[str, list[float]]:
    """Smoothed training loss of each other run minus the reference's, batch by batch, in nats."""
    base = smoothed(runs[reference].losses().values())
    return {
        name: [loss - other for loss, other in zip(smoothed(metrics.losses().values()), base, strict=False)]
        for name, metrics in runs.items()
        if name != reference
    }


def save_figure(figure: Figure, path: Path) -> None:
    """Write a picture atomically; the suffix (.png, .svg, .pdf) chooses the format."""
    with files.replacing(path) as partial:
        figure.savefig(partial, dpi=160)


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e5e9f0", linewidth=0.8)
    axes.set_axisbelow(True)


def loss_figure(runs: Mapping[str, Metrics], title: str = "Loss") -> Figure:
    """Training loss (faint, with its moving average) and validation loss, against batches and against training time."""
    figure = Figure(figsize=(11.0, 4.8), layout="constrained")
    by_batch, by_time = figure.subplots(1, 2, sharey=True)
    shortest = min(max(metrics.seconds().values(), default=0.0) for metrics in runs.values())
    by_time.axvline(
        shortest, color="#4c566a", linewidth=0.8, linestyle=":", label=f"fastest run ends: {shortest:.0f} s"
    )
    for index, (name, metrics) in enumerate(runs.items()):
        color, seconds = _RUN_COLORS[index % len(_RUN_COLORS)], metrics.seconds()
        losses, evaluated = list(metrics.losses().values()), metrics.validation_losses()
        for axes, place in ((by_batch, {step: float(step) for step in seconds}), (by_time, seconds)):
            axes.plot(list(place.values()), losses, color=color, alpha=0.2, linewidth=0.8)
            axes.plot(list(place.values()), smoothed(losses), color=color, linewidth=1.6, label=name)
            points = {place[step]: value for step, value in evaluated.items() if step in place}
            axes.plot(list(points), list(points.values()), "o", color=color, markeredgecolor="white")
    by_batch.plot([], [], "o", color=_RUN_COLORS[0], markeredgecolor="white", label="validation")
    by_batch.set(xlabel="iteration (batches)", ylabel="loss (nats per token)", title=title)
    by_time.set(xlabel="training time (s), without evaluations", title="The same against time")
    _tidy(by_batch)
    _tidy(by_time)
    by_batch.legend(frameon=False)
    by_time.legend(handles=[line for line in by_time.lines if line.get_linestyle() == ":"], frameon=False)
    return figure


def gap_figure(runs: Mapping[str, Metrics], reference: str) -> Figure:
    """Validation loss minus the reference's at the same iteration, one line per other run.

    Raises:
        ValueError: `reference` is none of the runs.
    """
    gaps = validation_gaps(runs, reference)
    figure = Figure(figsize=(8.0, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.axhline(0.0, color="#4c566a", linewidth=1.0)
    for index, (name, points) in enumerate(gaps.items(), start=1):
        color = _RUN_COLORS[index % len(_RUN_COLORS)]
        axes.plot(list(points), list(points.values()), "o-", color=color, markersize=4, label=name)
    axes.set(xlabel="iteration (batches)", ylabel="gap (nats per token)", title=f"Validation loss minus {reference}")
    _tidy(axes)
    if gaps:
        axes.legend(frameon=False)
    return figure


def read_trace(path: Path | str) -> tuple[Span, ...]:
    """Forwards, backwards and updates of a run's trace file, ordered by start; times in milliseconds.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file has no such span.
    """
    spans = []
    for event in json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]:
        labels = event.get("args", {})
        if event.get("ph") == "X" and labels.get("kind") in ("F", "B", "U"):
            number = labels.get("microbatch", labels["batch"])
            start, end = event["ts"] / 1000, (event["ts"] + event["dur"]) / 1000
            spans.append(
                Span(event["tid"], labels["kind"], labels["batch"], number, start, end, labels.get("chunk", 0))
            )
    if not spans:
        raise ValueError(f"{path}: no forward, backward or update in the trace")
    return tuple(sorted(spans, key=lambda span: span.start))


def steady_window(spans: Sequence[Span], batches: int) -> tuple[float, float]:
    """Start and end of `batches` batches from the middle of a trace, away from filling and draining.

    From the first forward of a batch on stage 0 to the first forward `batches` batches later: whole periods, under
    every schedule. A shorter trace is taken whole.
    """
    starts: dict[int, float] = {}
    for span in spans:
        if span.rank == 0 and span.kind == "F":
            starts[span.batch] = min(span.start, starts.get(span.batch, span.start))
    ordered = sorted(starts)
    if len(ordered) <= batches + 1:
        return min(span.start for span in spans), max(span.end for span in spans)
    first = (len(ordered) - batches) // 2
    return starts[ordered[first]], starts[ordered[first + batches]]


def idle_share(spans: Sequence[Span], stage: int, window: tuple[float, float]) -> float:
    """Share of the window in which the stage computes nothing; 0 to 1."""
    start, end = window
    busy, reached = 0.0, start
    for span in sorted((span for span in spans if span.rank == stage), key=lambda span: span.start):
        left, right = max(span.start, reached), min(span.end, end)
        if right > left:
            busy += right - left
            reached = right
    return 1.0 - busy / (end - start)


def timeline_figure(traces: Mapping[str, Sequence[Span]], batches: int = 3) -> Figure:
    """The compute of each stage over some batches of the steady state; a panel per trace, one time scale."""
    windows = {name: steady_window(spans, batches) for name, spans in traces.items()}
    length = max(end - start for start, end in windows.values())
    stages = range(max(span.rank for spans in traces.values() for span in spans) + 1)
    width, height = 10.0, 0.9 + len(traces) * (0.7 + 0.55 * len(stages))
    figure = Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(len(traces), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, spans) in zip(panels, traces.items(), strict=True):
        start, end = windows[name]
        inside = [span for span in spans if start < span.end and span.start < start + length]
        axes.set_xlim(0.0, length)
        rows = [f"stage {stage}\nidle {idle_share(spans, stage, (start, end)):.0%}" for stage in stages]
        shifted = [replace(span, start=span.start - start, end=span.end - start) for span in inside]
        draw(axes, shifted, rows, width - 1.0)
        axes.set_title(f"{name}: {(end - start) / batches:.0f} ms per batch", loc="left", fontsize=10)
    panels[-1].set_xlabel("time (ms); one color per batch, numbers are micro-batches")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper right", ncols=3, frameon=False)
    return figure
