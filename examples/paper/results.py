# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Losses of the runs that are done, and the table and picture that they give so far."""

import math
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from examples.paper import plan
from megatron_async import files, report

COLORS = ("#d08770", "#2e7d6b", "#b48ead", "#5e81ac", "#a3791b", "#4c566a")


class Losses:
    """The file of losses: one line for each run that is done, written whole at every change.

    Args:
        path: JSON lines; need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        rows = files.read_json_lines(path) if path.exists() else []
        self._rows: dict[plan.Key, dict[str, Any]] = {plan.key(shlex.split(row["command"])): row for row in rows}

    def __call__(self, run: plan.Run) -> float | None:
        """Validation loss of a run (nats per token); NaN if it diverged, None if it is not done with these options."""
        row = self._rows.get(run.key)
        if row is None:
            return None
        return math.nan if row["valid_loss"] is None else float(row["valid_loss"])

    def curve(self, run: plan.Run) -> list[tuple[int, float]]:
        """Batches and validation loss (nats per token) of a run that is done."""
        return [(batch, loss) for batch, loss in self._rows[run.key]["curve"]]

    def folder(self, run: plan.Run) -> Path:
        """The folder of a run's files, under the name that it was done by."""
        return self.path.parent / "runs" / str(self._rows.get(run.key, {"name": run.name})["name"])

    def seconds(self) -> list[float]:
        """Duration of each run that is done."""
        return [row["seconds"] for row in self._rows.values()]

    def add(self, run: plan.Run, metrics: report.Metrics, seconds: float) -> None:
        """Add a run that ended with an evaluation, or that diverged."""
        diverged = bool(metrics.training[-1]["skipped"])
        self._rows[run.key] = {
            "name": run.name,
            "valid_loss": math.nan if diverged else report.final_valid_loss(metrics),
            "curve": [[row["iteration"], row["valid_loss"]] for row in metrics.validation],
            "seconds": round(seconds, 1),
            "command": shlex.join(run.words),
        }
        files.write_atomically(self.path, "".join(files.json_line(row) for row in self._rows.values()))


def is_complete(run: plan.Run, metrics: report.Metrics, *, skips: int = 1) -> bool:
    """Whether a run has its last evaluation, or ended because its gradients were not finite.

    Args:
        skips: updates that the run skipped at its end; one is enough for a run that is known to be over.
    """
    if metrics.validation and metrics.validation[-1]["iteration"] == int(run.options["train-iters"]):
        return True
    last = metrics.training[-skips:]
    return len(last) == skips and all(row["skipped"] for row in last)


@dataclass(frozen=True, slots=True)
class Cell:
    """One variant of one row, over the seeds for which it and its twin are done.

    Attributes:
        rate: peak learning rate; `edge` if it is the smallest or largest of a grid of several.
        losses: by seed, nats per token.
        gaps: loss minus that of the twin of the same seed, by seed.
        recovered: share of the plain delay's mean gap that is gone, over seeds that have both; None without.
        paper: the paper's loss, gap and recovered share by scale.
    """

    row: str
    variant: str
    rate: float
    edge: bool
    losses: Mapping[int, float]
    gaps: Mapping[int, float]
    recovered: float | None
    paper: Mapping[str, Sequence[float | None]]


def recovered_share(gaps: Mapping[int, float], plain: Mapping[int, float]) -> float | None:
    """1 - gap / plain gap, of the means over the seeds that both have; None if one diverged or nothing was lost."""
    common = gaps.keys() & plain.keys()
    left, lost = (sum(values[seed] for seed in common) for values in (gaps, plain))
    return 1 - left / lost if lost > 0 and not math.isnan(left) else None


def cells(table: plan.Table, scale: plan.Scale, loss: plan.Loss) -> Iterator[Cell]:
    """The cells of the rows whose rate is chosen. A diverged run has the loss NaN."""
    for row in table.rows:
        rates = plan.grid(scale, row)
        rate = plan.best_rate(plan.grid_runs(table, scale, row), loss)
        if rate is None:
            continue
        runs = plan.cells(table, scale, row, rate)
        plan.check_twins(runs, table)
        found = {(run.variant, run.seed): value for run in runs if (value := loss(run)) is not None}
        gaps: dict[str, dict[int, float]] = {}
        for variant in plan.variants_of(table, row):
            losses = {seed: value for (name, seed), value in found.items() if name == variant}
            twins = {seed: found[table.twin, seed] for seed in losses if (table.twin, seed) in found}
            gaps[variant] = {seed: losses[seed] - twin for seed, twin in twins.items()}
            recovered = None
            if variant not in (table.twin, table.plain):
                recovered = recovered_share(gaps[variant], gaps[table.plain])
            edge = row.get("tuned", True) and len(rates) > 1 and rate in (min(rates), max(rates))
            paper = {name: _paper(table, row, name, variant) for name in row["paper"]}
            yield Cell(plan.row_name(row), variant, runs[0].rate, edge, losses, gaps[variant], recovered, paper)


def _paper(table: plan.Table, row: plan.Options, scale: str, variant: str) -> tuple[float | None, ...]:
    """Loss, gap and recovered share of a variant in the paper; the share as printed, from more digits than we have."""
    losses, printed = row["paper"][scale], row.get("recovered", {}).get(scale, {})
    loss = losses.get(variant)
    return loss, None if loss is None else loss - losses[table.twin], printed.get(variant)


def mean_and_spread(values: Sequence[float], sign: str = "") -> str:
    """Mean ± standard deviation of one run (n - 1); a single value has no spread."""
    if not values:
        return "-"
    if any(math.isnan(value) for value in values):
        return "diverged"
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{sign}.4f}{spread}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def markdown(table: plan.Table, scale: plan.Scale, loss: plan.Loss) -> str:
    """The table as it stands, with the number of runs behind it."""
    found = list(cells(table, scale, loss))
    scales = sorted({name for row in table.rows for name in row["paper"]})
    done = sum(loss(run) is not None for run in plan.known_runs(table, scale, loss))
    heads = ["Optimizer", "Variant", "Peak rate", "Seeds", "Loss", "Gap to twin", "Recovered"]
    heads += [f"Paper {name}: {what}" for name in scales for what in ("loss", "gap", "recovered")]
    lines = [
        f"# {table.title}: {scale.name}",
        "",
        f"{done} of {plan.count([table], scale, loss)} runs are done. Loss: validation, nats per token, mean ± standard"
        " deviation over seeds. Gap: to the synchronous run of the same seed."
        " Recovered: share of the plain delay's gap."
        f" {'Pipelines.' if scale.pipelines and not table.oracle else 'Delays are emulated in one process.'}"
        " A rate with * is at the edge of its grid.",
        "",
        f"| {' | '.join(heads)} |",
        f"|{'---|' * 2}{'---:|' * (len(heads) - 2)}",
    ]
    for cell in found:
        words = [cell.row, cell.variant, f"{cell.rate:g}{'*' if cell.edge else ''}", str(len(cell.losses))]
        words += [mean_and_spread(list(cell.losses.values()))]
        words += ["-" if cell.variant == table.twin else mean_and_spread(list(cell.gaps.values()), "+")]
        words += [_number(cell.recovered, ".0%")]
        for name in scales:
            forms = zip(cell.paper.get(name, (None, None, None)), (".3f", "+.3f", ".0%"), strict=True)
            words += [_number(value, form) for value, form in forms]
        lines.append(f"| {' | '.join(words)} |")
    return "\n".join(lines) + "\n"


def figure(table: plan.Table, scale: plan.Scale, loss: plan.Loss) -> Figure:
    """Gaps of every variant, ours beside the paper's; symmetric logarithmic axis."""
    found = list(cells(table, scale, loss))
    rows = list(dict.fromkeys(cell.row for cell in found))
    papers = sorted({name for cell in found for name, values in cell.paper.items() if values[1] is not None})
    variants = [variant for variant in table.variants if variant != table.twin]
    drawing = Figure(figsize=(5.2 * (1 + len(papers)), 4.2), layout="constrained")
    panels = drawing.subplots(1, 1 + len(papers), sharey=True, squeeze=False)[0]
    for axes, source in zip(panels, [None, *papers], strict=True):
        for place, (variant, color) in enumerate(zip(variants, COLORS, strict=False)):
            bars = [(rows.index(cell.row), *_gap(cell, source)) for cell in found if cell.variant == variant]
            bars = [bar for bar in bars if bar[1] is not None]
            width = 0.8 / len(variants)
            steps = [row + (place - (len(variants) - 1) / 2) * width for row, _, _ in bars]
            heights, errors = [bar[1] for bar in bars], [bar[2] for bar in bars]
            axes.bar(steps, heights, width, yerr=errors, color=color, label=variant, capsize=2)
        axes.set_yscale("symlog", linthresh=0.01)
        axes.axhline(0.0, color="#4c566a", linewidth=0.8)
        axes.set_xticks(range(len(rows)), rows, rotation=30)
        axes.set_title(f"this package, {scale.name}" if source is None else f"arXiv 2606.30634, {source}")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("gap to the synchronous twin (nats per token)")
    drawing.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(variants), frameon=False
    )
    return drawing


def curves(table: plan.Table, scale: plan.Scale, losses: Losses) -> Figure:
    """The table's curve over the batches: a panel for each row, a line for each variant that has files, first seed."""
    drawing = Figure(figsize=(5.2 * len(table.rows), 4.2), layout="constrained")
    panels = drawing.subplots(1, len(table.rows), squeeze=False)[0]
    for axes, row in zip(panels, table.rows, strict=True):
        rate = plan.best_rate(plan.grid_runs(table, scale, row), losses)
        for variant, color in zip(plan.variants_of(table, row), COLORS, strict=False):
            run = plan.make_run(table, scale, row, variant, rate or math.nan, table.seeds[0])
            path = losses.folder(run) / "metrics.jsonl"
            if losses(run) is not None and path.exists():
                metrics = report.read_metrics(path)
                lines = [line for line in (*metrics.training, *metrics.validation) if table.curve in line]
                points = [(line["iteration"], line[table.curve]) for line in lines]
                axes.plot([x for x, _ in points], [y for _, y in points], color=color, label=variant, linewidth=1)
        axes.set(title=plan.row_name(row), xlabel="batch", ylabel=table.curve)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.lines:
            axes.legend(frameon=False)
    return drawing


def _gap(cell: Cell, source: str | None) -> tuple[float | None, float]:
    """Mean gap and its spread, NaN where there is none; None for a variant with a run that diverged."""
    if source is not None:
        return cell.paper.get(source, (None, None))[1], math.nan
    gaps = list(cell.gaps.values())
    if not gaps or any(math.isnan(gap) for gap in gaps):
        return None, math.nan
    return statistics.fmean(gaps), statistics.stdev(gaps) if len(gaps) > 1 else math.nan


def write(table: plan.Table, scale: plan.Scale, losses: Losses) -> None:
    """Write TABLE.md and TABLE.png beside the file of losses."""
    folder = losses.path.parent
    files.write_atomically(folder / f"{table.name}.md", markdown(table, scale, losses))
    if any(cells(table, scale, losses)):
        drawing = curves(table, scale, losses) if table.curve else figure(table, scale, losses)
        report.save_figure(drawing, folder / f"{table.name}.png")
