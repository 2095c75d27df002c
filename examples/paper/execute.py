# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Starts the runs of tables side by side, and writes the tables after each."""

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from examples.paper import plan, results
from megatron_async import report
from megatron_async.launcher import end

ROOT = Path(__file__).resolve().parents[2]
POLL_SECONDS = 0.5
LOG_TAIL_LINES = 40
GRACE_SECONDS = 40


class RunFailed(Exception):
    """A training run that neither ended nor diverged; the message shows the end of its log."""


@dataclass(slots=True)
class Started:
    """A run in progress."""

    run: plan.Run
    folder: Path
    process: subprocess.Popen[bytes]
    start: float

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    def result(self) -> report.Metrics:
        """The metrics of a run whose process has ended.

        Raises:
            RunFailed: the process failed, and not because gradients stopped being finite.
        """
        if self.metrics.exists():
            metrics = report.read_metrics(self.metrics)
            if results.is_complete(self.run, metrics):
                return metrics
        log = (self.folder / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
        end = "\n".join(log[-LOG_TAIL_LINES:])
        raise RunFailed(f"{self.run.name} ended with status {self.process.returncode}. The end of its log:\n\n{end}")


def command(run: plan.Run, data: Sequence[str], metrics: Path) -> list[str]:
    """The command of a run: one process, or torchrun for a pipeline."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(run.processes)]
    start = [sys.executable, *(launcher if run.processes > 1 else [])]
    return [*start, "-m", "megatron_async.pretrain", *run.words, *data, "--metrics-file", str(metrics)]


def start(run: plan.Run, data: Sequence[str], output: Path) -> Started:
    """Start a run on one thread a process, with its files in a folder of its own."""
    folder = output / run.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            command(run, data, folder / "metrics.jsonl"),
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment,
        )
    return Started(run, folder, process, time.monotonic())


@contextmanager
def _ending(running: list[Started]) -> Iterator[None]:
    """Leaving the block ends the runs that are still in progress."""
    try:
        yield
    finally:
        end([started.process for started in running], GRACE_SECONDS)


def complete(
    runs: Iterable[plan.Run], data: Sequence[str], output: Path, jobs: int = 1
) -> Iterator[tuple[plan.Run, report.Metrics]]:
    """Do runs to their ends, `jobs` side by side; yield each when it has ended.

    Raises:
        RunFailed: a run failed; the others are ended.
    """
    waiting, running = list(runs), list[Started]()
    with _ending(running):
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(start(waiting.pop(0), data, output))
            time.sleep(POLL_SECONDS)
            for started in _ended(running):
                yield started.run, started.result()


def _waiting(
    tables: Sequence[plan.Table], scale: plan.Scale, losses: results.Losses, running: Sequence[Started]
) -> Iterator[plan.Run]:
    """Runs that can start now, in their order."""
    taken = {started.run.key for started in running}
    for table in tables:
        for run in plan.known_runs(table, scale, losses):
            if run.key not in taken and losses(run) is None:
                taken.add(run.key)
                yield run


def _ended(running: list[Started]) -> list[Started]:
    """Remove the runs that have ended from `running`, and return them."""
    ended = [started for started in running if started.process.poll() is not None]
    for started in ended:
        running.remove(started)
    return ended


def run_all(
    tables: Sequence[plan.Table],
    scale: plan.Scale,
    losses: results.Losses,
    data: Sequence[str],
    jobs: int,
    console: Console,
) -> None:
    """Do every run that is not done, `jobs` side by side.

    Raises:
        RunFailed: a run failed; the others are ended.
    """
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    running: list[Started] = []
    with (
        Progress(*columns, console=console, disable=not console.is_terminal, speed_estimate_period=3600) as progress,
        _ending(running),
    ):
        waiting = list(_waiting(tables, scale, losses, running))
        task = progress.add_task("runs", total=len(waiting))
        while True:
            for run in waiting[: jobs - len(running)]:
                running.append(start(run, data, losses.path.parent / "runs"))
            if not running:
                return
            waiting = []
            time.sleep(POLL_SECONDS)
            if not (ended := _ended(running)):
                continue
            for started in ended:
                losses.add(started.run, started.result(), time.monotonic() - started.start)
                console.print(f"{started.run.name}: loss {losses(started.run):.4f}", highlight=False, soft_wrap=True)
            for table in tables:
                results.write(table, scale, losses)
            waiting = list(_waiting(tables, scale, losses, running))
            left = len(waiting) + len(running)
            completed = progress.tasks[task].completed + len(ended)
            progress.update(task, completed=completed, total=completed + left)
