# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Train one small model three times on two CPU processes: 1F1B, 2BW, 2BW with error feedback.

Writes metrics, summary.json and pictures to a folder (default: runs/quickstart). Needs no GPU and no network: the text
is the source of Python's standard library.
"""

import argparse
import json
import logging
import os
import shlex
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from megatron_async import report
from megatron_async.cli import make_parser
from megatron_async.data.preprocessing.prepare import CorpusPaths, prepare_corpus
from megatron_async.files import write_atomically
from megatron_async.launcher import end, exit_on_sigterm
from megatron_async.training import provenance

STAGES = 2
MICRO_BATCH_SIZE = 16
MICROBATCHES = 2
EVAL_INTERVAL = 50
VOCAB_SIZE = 5120

# Everything that the three runs have in common.
BASE_ARGUMENTS = f"""
    --device cpu
    --pipeline-model-parallel-size {STAGES}
    --seq-length 128 --max-position-embeddings 128
    --micro-batch-size {MICRO_BATCH_SIZE} --global-batch-size {MICRO_BATCH_SIZE * MICROBATCHES}
    --optimizer muon --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-fraction 0.1
    --weight-decay 0.1 --clip-grad 1.0
    --eval-iters 8 --log-interval 10 --num-workers 0
"""

# The same split for all runs. FLOPs predict the layers' times of this model; the miniatures are halved.
LAYOUTS = {"tiny": "--pipeline-balance auto"}

# What makes each run different, in the order in which they run. The first is the reference for speed.
RUNS = {
    "1f1b": "--pipeline-schedule 1f1b",
    "2bw": "--pipeline-schedule 2bw",
    "2bw-error-feedback": "--pipeline-schedule 2bw --staleness-correction error-feedback",
}
TRACED_RUNS = ("1f1b", "2bw")

POLL_SECONDS = 0.2
LOG_TAIL_LINES = 80  # the launcher's own report takes about 40, after what the workers said
LAUNCHER_GRACE_SECONDS = 40  # the launcher itself gives its workers 30


class RunFailed(Exception):
    """A training run that ended badly; the message says which and shows the end of its log."""


class RunFiles:
    """Where one run writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metrics, self.trace, self.log = (folder / name for name in ("metrics.jsonl", "trace.json", "log.txt"))

    def clear(self) -> None:
        """Remove the files of an earlier quick start."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in (self.metrics, self.trace, self.log):
            path.unlink(missing_ok=True)


def training_command(name: str, files: RunFiles, *, model: str, iterations: int, corpus: CorpusPaths) -> list[str]:
    """The command of one run."""
    # The last evaluation follows the last batch.
    interval = EVAL_INTERVAL if iterations % EVAL_INTERVAL == 0 else iterations
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(STAGES)]
    command += ["-m", "megatron_async.pretrain", "--model", model]
    command += shlex.split(f"{BASE_ARGUMENTS} {LAYOUTS.get(model, '')}")
    command += ["--train-iters", str(iterations), "--eval-interval", str(interval)]
    command += corpus.megatron_arguments()
    command += shlex.split(RUNS[name])
    command += ["--metrics-file", str(files.metrics)]
    if name in TRACED_RUNS:
        command += ["--trace-file", str(files.trace)]
    return command


@contextmanager
def _launched(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run the command with its output in the log; leaving the block ends it and its workers."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # with more threads, stages would slow each other down
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            yield process
        finally:
            end([process], LAUNCHER_GRACE_SECONDS)


def log_tail(path: Path, lines: int = LOG_TAIL_LINES) -> str:
    """The last lines of a log."""
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def run_training(
    name: str, command: Sequence[str], files: RunFiles, iterations: int, console: Console
) -> report.Metrics:
    """Run one training to its end, with a progress bar on a terminal.

    Raises:
        RunFailed: the command failed, or ended without all its batches and an evaluation.
    """
    files.clear()
    columns = (
        TextColumn("{task.description:<20}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    with (
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
        _launched(command, files.log) as process,
    ):
        task = progress.add_task(name, total=iterations, loss="starting")
        while process.poll() is None:
            if files.metrics.exists() and (rows := report.read_metrics(files.metrics).training):
                progress.update(task, completed=rows[-1]["iteration"], loss=f"loss {rows[-1]['lm_loss']:.3f}")
            time.sleep(POLL_SECONDS)
        metrics = report.read_metrics(files.metrics) if files.metrics.exists() else report.Metrics({}, (), ())
        progress.update(task, completed=len(metrics.training))
    problem = ""
    if process.returncode != 0:
        problem = f"ended with status {process.returncode}"
    elif len(metrics.training) != iterations or not metrics.validation:
        problem = (
            f"wrote {len(metrics.training)} batches and {len(metrics.validation)} evaluations to {files.metrics}; "
            f"expected {iterations} batches and at least one evaluation"
        )
    if problem:
        raise RunFailed(f"{name} {problem}. The end of {files.log}:\n\n{log_tail(files.log)}")
    return metrics


def result_table(summary: Mapping[str, Any]) -> Table:
    """The summary for people; the first run is the reference for speed."""
    runs, equal = summary["runs"], summary["equal_time"]
    reference = next(iter(runs))
    table = Table(
        title=f"{summary['stages']} stages, {summary['microbatches']} micro-batches per batch",
        caption=f"Then: after {equal['seconds']:.0f} s of training, the end of the fastest run.",
    )
    table.add_column("schedule")
    headings = ("ms per\nbatch", f"speed\nto {reference}", "validation\nloss", "batches\nthen", "training\nloss then")
    for heading in headings:
        table.add_column(heading, justify="right")
    for name, run in runs.items():
        speed, then = runs[reference]["ms_per_batch"] / run["ms_per_batch"], equal["runs"][name]
        loss, batches = f"{run['valid_loss']:.4f}", str(then["batches"])
        table.add_row(name, f"{run['ms_per_batch']:.1f}", f"{speed:.2f}x", loss, batches, f"{then['lm_loss']:.3f}")
    return table


def lag_text(metrics: Mapping[str, report.Metrics], summary: Mapping[str, Any]) -> str:
    """How far the delayed runs lag behind the first one after the same number of batches, and why.

    Each explanation is given only where the figures show it.
    """
    reference, *_ = metrics
    gaps, lags = report.training_gaps(metrics, reference), []
    for name, gap in gaps.items():
        lags.append(f"{name} by up to {max(gap):.2f} (batch {gap.index(max(gap)) + 1}), at the end by {gap[-1]:.2f}")
    text = [f"Lag behind {reference} in training loss (nats) after the same number of batches: {'; '.join(lags)}."]
    if all(2 * gap.index(max(gap)) < len(gap) for gap in gaps.values()):
        text.append(
            "The lag builds up early, while the learning rate warms up and the loss falls fast, and shrinks later."
        )
    if gaps["2bw-error-feedback"][-1] < gaps["2bw"][-1]:
        text.append("Error feedback takes a part of the lag back.")
    done = [f"{name} {state['batches']}" for name, state in summary["equal_time"]["runs"].items()]
    text.append(f"Batches at equal time: {', '.join(done)}.")
    return " ".join(text)


def write_results(
    output: Path, metrics: Mapping[str, report.Metrics], commands: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Write summary.json and the pictures; return the summary."""
    summary = report.summary(metrics, stages=STAGES, microbatches=MICROBATCHES)
    extra = {
        "machine": provenance.machine(),
        "versions": provenance.versions(),
        "command": {name: shlex.join(command) for name, command in commands.items()},
    }
    write_atomically(output / "summary.json", json.dumps(summary | extra, indent=2) + "\n")
    report.save_figure(report.loss_figure(metrics, "Quick start"), output / "loss.png")
    written = {name: trace for name in metrics if (trace := RunFiles(output / name).trace).exists()}
    if traces := {name: report.read_trace(trace) for name, trace in written.items()}:
        report.save_figure(report.timeline_figure(traces), output / "timeline.png")
    return summary


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("quickstart", __doc__)
    add, folder = parser.add_argument, Path("runs/quickstart")
    add("--model", default="tiny", help="preset to train (default: %(default)s)")
    add("--iters", type=int, default=100, help="batches of each run (default: %(default)s)")
    add("--output", type=Path, default=folder, help="folder to write (default: %(default)s)")
    options = parser.parse_args(argv)
    if options.iters < 1:
        parser.error(f"--iters {options.iters}: a run needs at least one batch")
    options.output = options.output.resolve()
    return options


@exit_on_sigterm()
def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 if a run failed."""
    options = _parse(argv)
    # Megatron and torch report what this machine's GPU set-up lacks, and these runs use none.
    warnings.filterwarnings("ignore", module="megatron")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    console = Console()
    for name in ("summary.json", "loss.png", "timeline.png"):
        (options.output / name).unlink(missing_ok=True)
    console.print("Preparing the corpus (the source of Python's standard library)")
    corpus = prepare_corpus(options.output / "data", vocab_size=VOCAB_SIZE)
    commands, metrics = {}, {}
    for name in RUNS:
        files = RunFiles(options.output / name)
        commands[name] = training_command(name, files, model=options.model, iterations=options.iters, corpus=corpus)
        console.print(f"Training {name}: {options.iters} batches, log in {files.log}", highlight=False, soft_wrap=True)
        try:
            metrics[name] = run_training(name, commands[name], files, options.iters, console)
        except RunFailed as failure:
            console.print(str(failure), markup=False, highlight=False, soft_wrap=True)
            return 1
    summary = write_results(options.output, metrics, commands)
    console.print(result_table(summary))
    console.print(lag_text(metrics, summary), highlight=False)
    console.print(f"Summary and pictures: {options.output}", highlight=False, soft_wrap=True)
    return 0
