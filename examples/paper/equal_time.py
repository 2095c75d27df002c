# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Loss at equal wall-clock time: 1F1B, 2BW and 2BW with error feedback on two processes.

    python examples/paper/equal_time.py --quick --lr 0.016

measures the time of a batch of each in turns, then trains each for as many batches as fit into the time that 1F1B takes
for the batches of the scale, with a learning rate that falls over its own number of batches. The same command again
continues. Use a machine that does nothing else.
"""

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # examples/ is not installed

from examples.paper import execute, plan, results  # noqa: E402
from examples.paper.run import VOCAB_SIZE  # noqa: E402
from megatron_async import report  # noqa: E402
from megatron_async.data.preprocessing.prepare import prepare_corpus  # noqa: E402
from megatron_async.files import write_atomically  # noqa: E402
from megatron_async.training import provenance  # noqa: E402

VARIANTS = ("synchronous", "delayed", "error-feedback")
TURNS, TIMED_BATCHES = 3, 60


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", default="muon", help="row of table2 (default: %(default)s)")
    parser.add_argument("--lr", type=float, required=True, help="peak learning rate, such as the one that table2 chose")
    parser.add_argument("--quick", action="store_true", help="the shorter form of the toy scale")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="folder (default: runs/paper/equal-time)")
    return parser.parse_args(arguments)


def of_batches(run: plan.Run, batches: int) -> plan.Run:
    """The run with another number of batches and one evaluation at its end."""
    return dataclasses.replace(run, words=(*run.words, "--train-iters", str(batches), "--eval-interval", str(batches)))


def batches_in(milliseconds: Mapping[str, float], batches: int) -> dict[str, int]:
    """Batches of each variant in the time that the first takes for `batches`."""
    first = next(iter(milliseconds.values()))
    return {variant: round(batches * first / own) for variant, own in milliseconds.items()}


def _measure(runs: Sequence[plan.Run], data: Sequence[str], output: Path) -> dict[str, float]:
    """Milliseconds of a batch of each variant: the median of its turns' medians."""
    times: dict[str, list[float]] = {run.variant: [] for run in runs}
    for _ in range(TURNS):
        for run in runs:
            metrics = execute.complete(of_batches(run, TIMED_BATCHES), data, output / "timing")
            times[run.variant].append(report.median_ms(metrics))
    return {variant: statistics.median(values) for variant, values in times.items()}


def markdown(
    optimizer: str, milliseconds: Mapping[str, float], losses: Mapping[str, Mapping[int, float]], batches: int
) -> str:
    """The table as it stands."""
    counts, machine = batches_in(milliseconds, batches), provenance.machine()
    lines = [
        f"# Loss at equal wall-clock time: {optimizer}, two stages",
        "",
        f"Measured on {machine}. Every run has the time of {batches} batches of the first. Loss: validation, nats per "
        "token, mean ± standard deviation over seeds.",
        "",
        "| Variant | ms per batch | Batches | Seeds | Loss |",
        "|---|---:|---:|---:|---:|",
    ]
    for variant, own in milliseconds.items():
        found = list(losses.get(variant, {}).values())
        words = [variant, f"{own:.1f}", str(counts[variant]), str(len(found)), results.mean_and_spread(found)]
        lines.append(f"| {' | '.join(words)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 if a run failed."""
    asked = _parse(arguments)
    output = (asked.output or ROOT / "runs" / "paper" / "equal-time").resolve()
    scale = plan.read_scale("toy", quick=asked.quick, pipelines=True)
    table = plan.read_table("table2", rows=[asked.optimizer], variants=VARIANTS)
    data = prepare_corpus(ROOT / "runs" / "paper" / "data", vocab_size=VOCAB_SIZE).megatron_arguments()
    runs = [
        plan.make_run(table, scale, table.rows[0], variant, asked.lr, seed)
        for seed in table.seeds[: asked.seeds]
        for variant in VARIANTS
    ]
    timing = output / "milliseconds.json"
    try:
        if not timing.exists():
            write_atomically(timing, json.dumps(_measure(runs[: len(VARIANTS)], data, output)) + "\n")
        milliseconds = json.loads(timing.read_text(encoding="utf-8"))
        losses, batches = results.Losses(output / "losses.jsonl"), scale.recipe["arguments"]["train-iters"]
        found: dict[str, dict[int, float]] = {}
        for run in runs:
            run = of_batches(run, batches_in(milliseconds, batches)[run.variant])
            if losses(run) is None:
                metrics = execute.complete(run, data, output / "runs")
                losses.add(run, metrics, sum(row["iteration_ms"] for row in metrics.training) / 1e3)
            loss = losses(run)
            assert loss is not None
            found.setdefault(run.variant, {})[run.seed] = loss
            text = markdown(asked.optimizer, milliseconds, found, batches)
            write_atomically(output / "equal_time.md", text)
    except execute.RunFailed as failure:
        print(failure)
        return 1
    Console().print(text, highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
