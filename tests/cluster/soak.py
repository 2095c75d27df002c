# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Random faults in a SLURM cluster of two nodes, again and again, and nobody who helps.

    python -m tests.cluster.soak --faults 200        (or: make soak NODES=2 N=200)

A job of the real script trains on both nodes. Faults of `faults.py` hit it at random moments, at times the next one
before it has recovered. What supervisors do is done here: daemons that were killed are started again, links mended,
disks emptied. The job itself must come back without a command: go on for some batches after each fault, complete, and
end with the metrics file and the last checkpoint of an undisturbed job, bit by bit. Then the next job follows.

The journal in runs/soak counts faults of completed jobs. The same command goes on until it has counted enough; with
--minutes in parts. The last line is one JSON object; the exit status is 1 if a job did not recover or differed.
"""

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_async.files import json_line, read_json_lines
from megatron_async.launcher import exit_on_sigterm
from tests.cluster import hosts, slurm
from tests.cluster.faults import FAULTS, Target
from tests.cluster.run import ROOT, Run, write_documents
from tests.cluster.slurm import Cluster
from tools.soak import differences, tensors

SOAK = ROOT / "runs" / "soak"
BATCHES, SAVE_INTERVAL = 240, 10
_ON = 4  # batches beyond the last one: a rank that survives may still complete what is under way
_TOGETHER = 0.75  # probability that the next fault comes before the recovery
_DISK = "size=64m"
# Seconds: twice 300 s for launchers to meet, or 600 s of ranks that wait in a step that the controller has forgotten.
_RECOVERS_WITHIN = 1200.0


class Job:
    """A job of the real script, on both nodes."""

    def __init__(self, cluster: Cluster, run: Run, log: Path) -> None:
        self.run, self._cluster = run, cluster
        variables = {"RETRIES": "100000", "MAX_RESTARTS": "100000"}
        self._number = cluster.submit(run, f"--output={log}", **variables)

    @property
    def state(self) -> str:
        """State; empty while the controller does not answer."""
        asked = self._cluster.ask("squeue", "-h", "-t", "all", "-j", self._number, "-o", "%T")
        return asked.stdout.strip()

    def wait(self, batches: int, seconds: float = _RECOVERS_WITHIN) -> None:
        """Until so many batches are complete, or all."""
        deadline = time.monotonic() + seconds
        while (state := self.state) != "COMPLETED" and self.run.batches < batches:
            if state in ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL") or time.monotonic() > deadline:
                raise NotRecovered(f"job {self._number} is {state or 'unknown'} after {self.run.batches} batches")
            time.sleep(0.5)

    def restarts(self) -> int:
        """How often the scheduler has started it again."""
        words: list[str] = []
        while not words:  # the controller may have just come back
            shown = self._cluster.ask("scontrol", "show", "job", self._number).stdout.split()
            words = [word.partition("=")[2] for word in shown if word.startswith("Restarts=")]
        return int(words[0])


class NotRecovered(Exception):
    """A job did not come back by itself."""


@exit_on_sigterm()  # daemons end too
def main(argv: Sequence[str]) -> int:
    """Exit status: 0 if nothing was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200, help="end when the journal counts so many")
    parser.add_argument("--minutes", type=float, default=1e6, help="strike no more after that long")
    parser.add_argument("--kinds", nargs="+", choices=list(FAULTS), default=list(FAULTS), help="strike with these only")
    options = parser.parse_args(argv)
    if reason := slurm.missing():
        sys.stderr.write(f"soak: {reason}\n")
        return 2
    SOAK.mkdir(parents=True, exist_ok=True)
    journal, deadline = Journal(SOAK / "journal.jsonl"), time.monotonic() + 60 * options.minutes
    generator = random.Random()  # moments of real processes do not repeat anyway
    with _stage() as (cluster, disk):
        prefix = write_documents(str(SOAK / "documents"))
        expected = _undisturbed(cluster, prefix)
        target = Target(cluster, disk, generator)
        while journal.counted() < options.faults and time.monotonic() < deadline:
            run = Run(disk / "run", prefix, BATCHES, SAVE_INTERVAL)
            shutil.rmtree(run.folder, ignore_errors=True)
            if not _disturb(target, run, expected, journal, options, deadline):
                break
    sys.stdout.write(json.dumps(journal.summary()) + "\n")
    return 1 if journal.failed() else 0


@contextmanager
def _stage() -> Iterator[tuple[Cluster, Path]]:
    """A cluster, and a small file system that its nodes see."""
    folder, disk = SOAK / "cluster", SOAK / "disk"
    shutil.rmtree(folder, ignore_errors=True)
    for path in (folder, disk):
        path.mkdir(exist_ok=True)
    with ExitStack() as stack:
        subprocess.run(["mount", "-t", "tmpfs", "-o", _DISK, "tmpfs", str(disk)], check=True)
        stack.callback(subprocess.run, ["umount", "--lazy", str(disk)], check=True)
        machines = stack.enter_context(hosts.Hosts(folder))
        yield stack.enter_context(Cluster(folder, machines)), disk


def _undisturbed(cluster: Cluster, prefix: str) -> Any:
    """Result of an undisturbed job; kept for later parts. After a change of numbers delete runs/soak."""
    run = Run(SOAK / "undisturbed", prefix, BATCHES, SAVE_INTERVAL)
    if run.batches == BATCHES:
        return _result(run)
    shutil.rmtree(run.folder, ignore_errors=True)
    began = time.monotonic()
    job = Job(cluster, run, SOAK / "undisturbed.out")
    job.wait(BATCHES, 1800)
    while job.state != "COMPLETED":
        time.sleep(0.5)
    sys.stdout.write(f"undisturbed: {time.monotonic() - began:.0f} s\n")
    return _result(run)


def _result(run: Run) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Every tensor of the last checkpoint, and the metrics without times."""
    from megatron_async.checkpoint import folder

    newest = folder.newest(run.saves)
    assert newest is not None
    return tensors(newest.path), run.rows()


def _disturb(
    target: Target, run: Run, expected: Any, journal: "Journal", options: argparse.Namespace, deadline: float
) -> bool:
    """Complete one job, with faults on the way; whether it ended as it should."""
    log, number = SOAK / f"job-{len(journal.rows)}.out", len(journal.rows)
    job, generator = Job(target.cluster, run, log), target.generator
    struck = 0
    while job.state != "COMPLETED":
        time.sleep(generator.uniform(0, 6))
        kinds: list[str] = []
        restarts, began = job.restarts(), time.monotonic()
        while journal.counted() + struck < options.faults and time.monotonic() < deadline:
            kind = generator.choice(options.kinds)
            if FAULTS[kind](target):
                kinds.append(kind)
            if generator.random() > _TOGETHER:
                break
            time.sleep(generator.uniform(0, 20))
        before, over = run.batches, time.monotonic()
        row = {"job": number, "kinds": kinds, "batch": before, "lasted": round(over - began, 1)}
        try:
            job.wait(before + _ON)
            row |= {"recovered": round(time.monotonic() - over, 1), "restarts": job.restarts() - restarts}
        except NotRecovered as error:
            journal.write(row | {"error": str(error)})
            sys.stdout.write(f"{error}\n{log.read_text()[-5000:]}\n")
            return False
        if kinds:
            struck += len(kinds)
            journal.write(row)
    shutil.copy(run.folder / "metrics.jsonl", log.with_suffix(".jsonl"))
    found = differences(_result(run), expected)
    journal.write({"job": number, "complete": True, "faults": struck, "differences": found})
    return not found


class Journal:
    """Faults and completed jobs, one a line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows = read_json_lines(path) if path.exists() else []

    def write(self, row: dict[str, Any]) -> None:
        row = {"at": datetime.now(UTC).isoformat(timespec="seconds")} | row
        self.rows.append(row)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json_line(row))
        sys.stdout.write(json_line(row))
        sys.stdout.flush()

    def counted(self) -> int:
        """Faults of jobs that completed as they should."""
        return sum(row["faults"] for row in self.rows if "complete" in row and not row["differences"])

    def failed(self) -> bool:
        return any(row.get("error") or row.get("differences") for row in self.rows)

    def summary(self) -> dict[str, Any]:
        complete = {row["job"] for row in self.rows if "complete" in row and not row["differences"]}
        faults = [row for row in self.rows if row.get("kinds") and row["job"] in complete]
        return {
            "faults": self.counted(),
            "jobs": len(complete),
            "kinds": dict(Counter(kind for row in faults for kind in row["kinds"])),
            "together": sum(len(row["kinds"]) for row in faults if len(row["kinds"]) > 1),
            "restarts": sum(row["restarts"] for row in faults),
            "median_recovery_s": statistics.median(row["recovered"] for row in faults) if faults else None,
            "failures": [row for row in self.rows if row.get("error") or row.get("differences")],
        }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
