# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Runs for a cluster: a file of command lines, and a SLURM array job that runs one line in each task."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from examples import pretrain
from examples.paper import plan, results
from megatron_async import files, report

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
                if results.is_complete(run, metrics):
                    losses.add(run, metrics, sum(row["iteration_ms"] for row in metrics.training) / 1e3)


def write(tables: Sequence[plan.Table], scale: plan.Scale, losses: results.Losses, output: Path) -> str:
    """Collect what is done, write tables and the jobs that are left; return what to do next.

    Raises:
        ValueError: TOKENIZER or DATA is not set.
    """
    collect(tables, scale, losses)
    for table in tables:
        results.write(table, scale, losses)
    runs = {run.name: run for table in tables for run in plan.known_runs(table, scale, losses) if losses(run) is None}
    if not runs:
        return f"Every run is done. Tables: {output}"
    if missing := [name for name in ("TOKENIZER", "DATA") if name not in os.environ]:
        raise ValueError(f"{' and '.join(missing)} not set: the runs need {pretrain.REQUIRED[missing[0]]}.")
    lines = []
    for name, run in runs.items():
        paths = pretrain.files({**os.environ, "SAVE": str(output / "runs" / name)})
        lines.append(shlex.join([*run.words, *pretrain.words(paths)]))
    jobs, script = output / "jobs.txt", output / "array.sbatch"
    files.write_atomically(jobs, "\n".join(lines) + "\n")
    text = SCRIPT.format(count=len(lines), jobs=shlex.quote(str(jobs)), **scale.recipe["cluster"])
    files.write_atomically(script, text)
    return f"{len(lines)} jobs in {jobs}. Start them with `sbatch {script}`; then give this command again."
