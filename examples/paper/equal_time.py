# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Loss at equal wall-clock time: schedules and corrections on two processes.

    python examples/paper/run.py equal_time --scale toy --quick --seeds 1 --variants synchronous
    python examples/paper/equal_time.py --quick

The first command chooses the learning rates. The second measures the time of a batch of each variant in turns, on a
machine that should do nothing else, then trains each for as many batches as fit into the time that 1F1B takes for the
batches of the scale, with a learning rate that falls over its own number of batches. Training may share the machine:
only the number of batches counts. With `--oracle` it runs in one process each, with the delay emulated: the losses are
the same, several runs fit beside each other. The same command again continues.

Interleaved zero bubble is synchronous: its losses are those of 1F1B. Its time is that of torch's schedule relative to
Megatron's 1F1B in `benchmarks`, on layers of the model's sizes.
"""

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # benchmarks/ and examples/ are not installed

from benchmarks import schedules  # noqa: E402
from benchmarks.contenders import LIMIT  # noqa: E402
from benchmarks.stack import Cell  # noqa: E402
from examples.paper import execute, plan, results  # noqa: E402
from examples.paper.run import VOCAB_SIZE  # noqa: E402
from megatron_async import report  # noqa: E402
from megatron_async.data.preprocessing.prepare import prepare_corpus  # noqa: E402
from megatron_async.files import write_atomically  # noqa: E402
from megatron_async.launcher import exit_on_sigterm  # noqa: E402
from megatron_async.training import provenance  # noqa: E402

ZERO_BUBBLE = "zero-bubble"
TURNS, TIMED_BATCHES = 3, 60
EVALUATIONS = 4
"""Per run, evenly spaced."""

Milliseconds = Mapping[str, float]
"""Of a batch, by variant; the first has the time that all get."""
Curve = Sequence[tuple[int, float]]
"""Batches and validation loss (nats per token)."""


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=[], metavar="ROW", help="rows of equal_time.toml (default: all)")
    parser.add_argument("--lr", type=float, help="this peak learning rate, not the one that run.py chose")
    parser.add_argument("--quick", action="store_true", help="the shorter form of the toy scale")
    parser.add_argument("--oracle", action="store_true", help="train with the delay oracle, one run on each core")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="folder (default: runs/paper/equal-time)")
    return parser.parse_args(arguments)


def of_batches(run: plan.Run, batches: int, evaluations: int = EVALUATIONS) -> plan.Run:
    """The run with another number of batches, a multiple of `evaluations`."""
    words = ("--train-iters", str(batches), "--eval-interval", str(batches // evaluations))
    return dataclasses.replace(run, words=(*run.words, *words))


def batches_in(milliseconds: Milliseconds, batches: int) -> dict[str, int]:
    """Batches of each variant in the time that the first takes for `batches`; multiples of EVALUATIONS."""
    first = next(iter(milliseconds.values()))
    return {variant: EVALUATIONS * round(batches * first / own / EVALUATIONS) for variant, own in milliseconds.items()}


def measure_zero_bubble(scale: plan.Scale) -> float:
    """Time of a batch of interleaved zero bubble relative to 1F1B, both on layers of the model's sizes.

    Raises:
        ValueError: one of them could not be measured.
    """
    sizes = scale.recipe["arguments"] | scale.recipe["pipeline"]
    cell = Cell(
        sizes["pipeline-model-parallel-size"],
        sizes["global-batch-size"] // sizes["micro-batch-size"],
        rounds=TURNS,
        batches=TIMED_BATCHES,
        sequence=sizes["seq-length"],
        samples=sizes["micro-batch-size"],
        hidden=sizes["hidden-size"],
    )
    ours, other = "megatron-1f1b", "torch-interleaved-zero-bubble"
    rows, absent = schedules.measure([cell], [LIMIT, ours, other])
    if absent:
        raise ValueError("\n".join(f"{row['contender']}: {row['reason']}" for row in absent))
    times = {row["contender"]: row["ms_median"] for row in rows}
    return float(times[other] / times[ours])


def _measure(runs: Sequence[plan.Run], data: Sequence[str], output: Path, zero_bubble: float) -> dict[str, float]:
    """Milliseconds of a batch of each variant: the median of its turns' medians."""
    times: dict[str, list[float]] = {run.variant: [] for run in runs}
    for turn in range(TURNS):
        for run in runs if turn % 2 == 0 else reversed(runs):
            for _, metrics in execute.complete([of_batches(run, TIMED_BATCHES, 1)], data, output / "timing"):
                times[run.variant].append(report.median_ms(metrics))
    found = {variant: statistics.median(values) for variant, values in times.items()}
    first = next(iter(found))
    return {first: found[first], ZERO_BUBBLE: zero_bubble * found[first], **found}


def markdown(
    milliseconds: Mapping[str, Milliseconds], curves: Mapping[tuple[str, str], Mapping[int, Curve]], batches: int
) -> str:
    """The table as it stands."""
    machine = provenance.machine()
    lines = [
        "# Loss at equal wall-clock time, two stages",
        "",
        f"Measured on {machine['processor']}, {machine['usable_cores']} cores. Every run has the time of {batches}"
        " batches of 1F1B. Loss: validation, nats per token, mean ± standard deviation over seeds. Difference: to"
        " 1F1B with the same seed.",
        "",
        "| Optimizer | Variant | ms per batch | Batches | Seeds | Loss | Difference |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for optimizer, times in milliseconds.items():
        counts = batches_in(times, batches)
        reference = next(iter(times))
        first = _last(curves.get((optimizer, reference), {}))
        for variant, own in times.items():
            found = _last(curves.get((optimizer, variant), {}))
            gaps = [loss - first[seed] for seed, loss in found.items() if seed in first]
            words = [optimizer, variant, f"{own:.1f}", str(counts[variant]), str(len(found))]
            words += [results.mean_and_spread(list(found.values()))]
            words += ["-" if variant == reference else results.mean_and_spread(gaps, "+")]
            lines.append(f"| {' | '.join(words)} |")
    return "\n".join(lines) + "\n"


def _last(curves: Mapping[int, Curve]) -> dict[int, float]:
    return {seed: curve[-1][1] for seed, curve in curves.items()}


def figure(milliseconds: Mapping[str, Milliseconds], curves: Mapping[tuple[str, str], Mapping[int, Curve]]) -> Figure:
    """Loss over the time of training, mean over seeds: a panel for each optimizer, a line for each variant."""
    drawing = Figure(figsize=(5.2 * len(milliseconds), 4.2), layout="constrained")
    panels = drawing.subplots(1, len(milliseconds), squeeze=False)[0]
    for axes, (optimizer, times) in zip(panels, milliseconds.items(), strict=True):
        for (variant, own), color in zip(times.items(), results.COLORS, strict=True):
            points = list(zip(*curves.get((optimizer, variant), {}).values(), strict=True))
            seconds = [point[0][0] * own / 1e3 for point in points]
            losses = [statistics.fmean(loss for _, loss in point) for point in points]
            axes.plot(seconds, losses, color=color, label=variant, marker="o", markersize=3)
        axes.set(title=optimizer, xlabel="seconds of training", ylabel="validation loss (nats per token)")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    return drawing


def _runs(table: plan.Table, scale: plan.Scale, row: plan.Options, rate: float, seed: int) -> list[plan.Run]:
    """The variants of a row, but for zero bubble."""
    return [plan.make_run(table, scale, row, variant, rate, seed) for variant in plan.variants_of(table, row)]


def _rates(table: plan.Table, asked: argparse.Namespace) -> dict[str, float]:
    """The peak learning rate of each row: the given one, or the one of the lowest loss among the runs of run.py.

    Raises:
        ValueError: these runs are not done.
    """
    oracle = plan.read_scale("toy", quick=asked.quick, pipelines=False)
    losses = results.Losses(ROOT / "runs" / "paper" / oracle.name / "losses.jsonl")
    found = {
        plan.row_name(row): asked.lr or plan.best_rate(plan.grid_runs(table, oracle, row), losses) for row in table.rows
    }
    if missing := [name for name, rate in found.items() if rate is None]:
        raise ValueError(
            f"no learning rate for {', '.join(missing)}. Give --lr, or run `examples/paper/run.py equal_time --scale"
            f" toy{' --quick' * asked.quick} --seeds 1 --variants synchronous` first."
        )
    return {name: rate for name, rate in found.items() if rate is not None}


def _times(
    table: plan.Table, scale: plan.Scale, rates: Mapping[str, float], data: Sequence[str], output: Path
) -> dict[str, dict[str, float]]:
    """Milliseconds of a batch by row and variant, measured once."""
    path = output / "milliseconds.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    missing = [row for row in table.rows if plan.row_name(row) not in known]
    zero_bubble = measure_zero_bubble(scale) if missing else 1.0
    for row in missing:
        name = plan.row_name(row)
        known[name] = _measure(_runs(table, scale, row, rates[name], table.seeds[0]), data, output, zero_bubble)
        write_atomically(path, json.dumps(known, indent=1) + "\n")
    return {plan.row_name(row): known[plan.row_name(row)] for row in table.rows}


def _train(
    table: plan.Table,
    scale: plan.Scale,
    rates: Mapping[str, float],
    milliseconds: Mapping[str, Milliseconds],
    data: Sequence[str],
    output: Path,
    seeds: int,
) -> str:
    """Do the runs that are not done, seed by seed; write table and picture after each. Returns the table."""
    losses, batches = results.Losses(output / "losses.jsonl"), scale.recipe["arguments"]["train-iters"]
    runs: dict[tuple[str, str, int], plan.Run] = {}
    for seed, row in itertools.product(table.seeds[:seeds], table.rows):
        name = plan.row_name(row)
        counts = batches_in(milliseconds[name], batches)
        first, *others = _runs(table, scale, row, rates[name], seed)
        for run in (first, dataclasses.replace(first, variant=ZERO_BUBBLE), *others):
            runs[name, run.variant, seed] = of_batches(run, counts[run.variant])

    def write() -> str:
        curves: dict[tuple[str, str], dict[int, Curve]] = {}
        for (name, variant, seed), run in runs.items():
            if losses(run) is not None:
                curves.setdefault((name, variant), {})[seed] = losses.curve(run)
        text = markdown(milliseconds, curves, batches)
        write_atomically(output / "equal_time.md", text)
        report.save_figure(figure(milliseconds, curves), output / "equal_time.png")
        return text

    waiting = [run for run in runs.values() if losses(run) is None]
    jobs = 1 if scale.pipelines else os.cpu_count() or 1
    for run, metrics in execute.complete(waiting, data, output / "runs", jobs):
        losses.add(run, metrics, sum(row["iteration_ms"] for row in metrics.training) / 1e3)
        write()
    return write()


@exit_on_sigterm()
def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 if a run failed, 2 for wrong arguments."""
    asked = _parse(arguments)
    warnings.filterwarnings("ignore", module="megatron")  # which GPU packages are missing
    output = (asked.output or ROOT / "runs" / "paper" / "equal-time").resolve()
    scale = plan.read_scale("toy", quick=asked.quick, pipelines=True)
    try:
        table = plan.read_table("equal_time", rows=asked.rows)
        rates = _rates(table, asked)
    except ValueError as error:
        print(f"equal_time.py: {error}", file=sys.stderr)
        return 2
    data = prepare_corpus(ROOT / "runs" / "paper" / "data", vocab_size=VOCAB_SIZE).megatron_arguments()
    try:
        milliseconds = _times(table, scale, rates, data, output)
        trained = dataclasses.replace(scale, pipelines=not asked.oracle)
        text = _train(table, trained, rates, milliseconds, data, output, asked.seeds)
    except (execute.RunFailed, ValueError) as failure:
        print(failure)
        return 1
    Console().print(text, highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
