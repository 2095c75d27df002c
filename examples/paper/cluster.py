# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Runs for a cluster: a file of command lines, and a SLURM array job that runs one line in each task."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from examples import pretrain
from examples.paper import plan, results
from megatron_async import files, report

MAX_SKIPS = 10
"""Default of `--max-consecutive-skips`."""

SCRIPT = """#!/usr/bin/env bash
#SBATCH --job-name=paper
#SBATCH --array=1-{count}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={gpus}
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR1@600
# Task n runs line n of jobs.txt. Submit from the root of the repository.
set -euo pipefail
eval "set -- $(sed -n "${{SLURM_ARRAY_TASK_ID}}p" {jobs})"
source examples/slurm/pretrain.sbatch
"""


def collect(tables: Sequence[plan.Table], scale: plan.Scale, losses: results.Losses) -> None:
    """Add the losses of runs whose metrics file holds the last evaluation."""
    for table in tables:
        for run in plan.known_runs(table, scale, losses):
            path = losses.path.parent / "runs" / run.name / "metrics.jsonl"
            if losses(run) is None and path.exists():
                metrics = report.read_metrics(path)
                # The run may go on: one skipped update is not its end.
                skips = int(run.options.get("max-consecutive-skips", MAX_SKIPS))
                if results.is_complete(run, metrics, skips=skips):
                    losses.add(run, metrics, sum(row["iteration_ms"] for row in metrics.training) / 1e3)


def _size(runs: Sequence[plan.Run], scale: plan.Scale) -> dict[str, int]:
    """Nodes and GPUs of a task: the recipe's, or one where the oracle clips by part of the model.

    Raises:
        ValueError: runs of both kinds.
    """
    single = [run.options.get("gradient-delay", "").startswith("pipedream") for run in runs]
    if any(single) and not all(run.options.get("gradient-delay") for run in runs):
        raise ValueError("figure6 emulates PipeDream on one GPU a run: give it without other tables.")
    size: dict[str, int] = {"nodes": 1, "gpus": 1} if any(single) else scale.recipe["cluster"]
    return size


def write(tables: Sequence[plan.Table], scale: plan.Scale, losses: results.Losses, output: Path) -> str:
    """Collect what is done, write tables and the jobs that are left; return what to do next.

    Raises:
        ValueError: TOKENIZER or DATA is not set.
    """
    collect(tables, scale, losses)
    for table in tables:
        results.write(table, scale, losses)
    runs = {run.key: run for table in tables for run in plan.known_runs(table, scale, losses) if losses(run) is None}
    if not runs:
        return f"Every run is done. Tables: {output}"
    if missing := [name for name in ("TOKENIZER", "DATA") if name not in os.environ]:
        raise ValueError(f"{' and '.join(missing)} not set: the runs need {pretrain.REQUIRED[missing[0]]}.")
    lines = []
    for run in runs.values():
        paths = pretrain.files({**os.environ, "SAVE": str(output / "runs" / run.name)})
        lines.append(shlex.join([*run.words, *pretrain.words(paths)]))
    jobs, script = output / "jobs.txt", output / "array.sbatch"
    files.write_atomically(jobs, "\n".join(lines) + "\n")
    text = SCRIPT.format(count=len(lines), jobs=shlex.quote(str(jobs)), **_size(list(runs.values()), scale))
    files.write_atomically(script, text)
    return f"{len(lines)} jobs in {jobs}. Start them with `sbatch {script}`; then give this command again."
