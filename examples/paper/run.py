# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Run the experiments behind tables of the paper, and write the tables.

    python examples/paper/run.py table1 --scale toy --quick

plans the runs, does those that are not done, and writes TABLE.md and TABLE.png after every run. The same command again
continues. Scales with a recipe for a cluster write the jobs of a SLURM array instead. The README beside this file
explains tables and scales.
"""

import argparse
import os
import statistics
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # examples/ is not installed

from examples.paper import cluster, downstream, execute, plan, results  # noqa: E402
from megatron_async.data.preprocessing.prepare import prepare_corpus  # noqa: E402
from megatron_async.launcher import exit_on_sigterm  # noqa: E402

VOCAB_SIZE = 512


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", metavar="TABLE", help="files of tables/, without .toml")
    parser.add_argument(
        "--scale", default="toy", help="toy (CPU); 135m, 360m, 2b, 10b, or a recipe.toml (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="the shorter form of the scale")
    parser.add_argument("--rows", nargs="+", default=[], metavar="ROW", help="these rows only, in this order")
    parser.add_argument("--variants", nargs="+", default=[], metavar="NAME", help="the first two and these only")
    parser.add_argument("--lr", type=float, help="this peak learning rate, without a grid")
    parser.add_argument("--seeds", type=int, help="the first so many seeds only")
    parser.add_argument("--pipelines", action="store_true", help="pipelines in place of the delay oracle")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes side by side (default: cores)")
    parser.add_argument("--output", type=Path, help="folder (default: runs/paper/SCALE)")
    parser.add_argument("--plan", action="store_true", help="print the plan and start nothing")
    options = parser.parse_args(arguments)
    for name in ("jobs", "seeds"):
        if (value := getattr(options, name)) is not None and value < 1:
            parser.error(f"--{name} {value}: must be at least 1")
    return options


def describe(tables: Sequence[plan.Table], scale: plan.Scale, losses: results.Losses, jobs: int) -> str:
    """Number of runs and the time that they will take."""
    known = {run.key: run for table in tables for run in plan.known_runs(table, scale, losses)}
    done = sum(losses(run) is not None for run in known.values())
    total = plan.count(tables, scale, losses)
    text = f"{', '.join(table.name for table in tables)} at {scale.name}: {total} runs, {done} done."
    seconds = statistics.median(losses.seconds() or [scale.seconds])
    if seconds:
        basis = "the runs that are done" if losses.seconds() else "our machine"
        minutes = (total - done) * seconds / jobs / 60
        text += f" About {minutes:.0f} minutes ({seconds:.0f} s a run on {basis}, {jobs} side by side)."
    return text


@exit_on_sigterm()
def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 if a run failed, 2 for wrong arguments."""
    asked = _parse(arguments)
    warnings.filterwarnings("ignore", module="megatron")  # which GPU packages are missing
    try:
        scale = plan.read_scale(asked.scale, quick=asked.quick, pipelines=asked.pipelines)
        tables = [plan.read_table(name, rows=asked.rows, variants=asked.variants) for name in asked.tables]
        if problems := [each for table in tables for each in plan.objections(table, scale)]:
            raise ValueError("\n".join(problems))
    except ValueError as error:
        print(f"run.py: {error}", file=sys.stderr)
        return 2
    if asked.lr is not None:
        scale = replace(scale, grid={"default": [asked.lr]})
    tables = [replace(table, seeds=table.seeds[: asked.seeds]) for table in tables]
    output = (asked.output or ROOT / "runs" / "paper" / (scale.name + "-pipelines" * asked.pipelines)).resolve()
    console = Console()
    losses = results.Losses(output / "losses.jsonl")
    jobs = max(1, asked.jobs // 2) if asked.pipelines else asked.jobs
    console.print(describe(tables, scale, losses, jobs), highlight=False)
    if asked.plan:
        return 0
    if "cluster" in scale.recipe:
        try:
            said = cluster.write(tables, scale, losses, output)
            if all(losses(run) is not None for table in tables for run in plan.known_runs(table, scale, losses)):
                said += "".join(f"\n{downstream.evaluate(table, scale, losses)}" for table in tables if table.tasks)
            console.print(said, highlight=False, soft_wrap=True)
        except ValueError as error:
            print(f"run.py: {error}", file=sys.stderr)
            return 2
        return 0
    console.print("Preparing the corpus (the source of Python's standard library)")
    corpus = prepare_corpus(ROOT / "runs" / "paper" / "data", vocab_size=VOCAB_SIZE)
    try:
        execute.run_all(tables, scale, losses, corpus.megatron_arguments(), jobs, console)
    except execute.RunFailed as failure:
        console.print(str(failure), markup=False, highlight=False, soft_wrap=True)
        return 1
    for table in tables:
        results.write(table, scale, losses)
        console.print((output / f"{table.name}.md").read_text(encoding="utf-8"), highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
