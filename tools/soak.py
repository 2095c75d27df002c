# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Kill a run again and again at random moments, and check that nothing is lost.

    python tools/soak.py --kills 50        (or: make soak N=50)

The run: 2BW with error feedback, Muon and dropout on two CPU processes, a checkpoint every few batches. SIGKILL ends
one rank or both; the same command line starts the run again, until it is complete. Its last checkpoint and its metrics
file must be bit-identical to those of an undisturbed run. Further runs follow until there were enough kills. The last
line is one JSON object; the exit status is 1 if anything differed.

A surviving rank that does not end by itself is ended as torchrun would, and counted: if rank 0 is killed before the
ranks have met, torch goes on looking for it.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/ is not installed

from benchmarks import processes

RECIPE = (
    "--device cpu --num-layers 4 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 8 --lr 0.02 --min-lr 0.002 "
    "--lr-decay-style cosine --lr-warmup-iters 2 --weight-decay 0.1 --clip-grad 1.0 --attention-dropout 0.1 "
    "--hidden-dropout 0.1 --mock-data --tokenizer-type NullTokenizer --vocab-size 61 "
    "--make-vocab-size-divisible-by 8 --eval-interval 7 --eval-iters 1 --num-workers 0 --normalization RMSNorm "
    "--swiglu --disable-bias-linear --position-embedding-type rope --seed 7 --optimizer muon "
    "--staleness-correction error-feedback --pipeline-schedule 2bw --pipeline-model-parallel-size 2 "
    "--distributed-timeout-minutes 1 --keep-last 2"
)
# Seconds after which survivors of a killed rank are ended, as torchrun does.
_END_SECONDS = 30.0


@dataclass
class Summary:
    """What happened."""

    kills: int = 0
    kills_of_all_ranks: int = 0
    kills_during_a_save: int = 0
    runs_completed: int = 0
    starts: int = 0
    survivors: int = 0
    survivors_ended_by_the_launcher: int = 0
    differences: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class Plan:
    """Number of kills and deadline; each kill comes at a random moment of an undisturbed run's duration."""

    kills: int
    deadline: float
    duration: float
    generator: random.Random

    def goes_on(self, summary: Summary) -> bool:
        return summary.kills < self.kills and time.monotonic() < self.deadline


def main(argv: list[str]) -> int:
    """Exit status: 0 if nothing was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after that long, with fewer kills")
    parser.add_argument("--iterations", type=int, default=40, help="batches in a run")
    parser.add_argument("--save-interval", type=int, default=3, help="batches between checkpoints")
    parser.add_argument("--async-save", action="store_true", help="write checkpoints while training goes on")
    parser.add_argument("--seed", type=int, default=1, help="of the moments of the kills")
    options = parser.parse_args(argv)
    began, summary, generator = time.monotonic(), Summary(), random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        reference = Run(Path(folder) / "reference", options)
        start = time.monotonic()
        if (codes := reference.start().wait()) != [0, 0]:
            raise SystemExit(f"the undisturbed run failed: {codes}\n{reference.log()}")
        duration = time.monotonic() - start
        expected = reference.result()
        plan = Plan(options.kills, began + 60 * options.minutes, duration, generator)
        while plan.goes_on(summary):
            shutil.rmtree(Path(folder) / "disturbed", ignore_errors=True)
            _disturb(Run(Path(folder) / "disturbed", options), expected, plan, summary)
    summary.seconds = round(time.monotonic() - began, 1)
    sys.stdout.write(json.dumps(asdict(summary)) + "\n")
    return 1 if summary.differences else 0


def _disturb(run: "Run", expected: Any, plan: "Plan", summary: Summary) -> None:
    """Complete one run, with kills on the way."""
    while True:
        summary.starts += 1
        ranks = run.start()
        if not plan.goes_on(summary):
            codes = ranks.wait()
        elif ranks.ended_within(plan.generator.uniform(0.0, plan.duration)):
            codes = ranks.codes()
        else:
            victims = plan.generator.choice([[0], [1], [0, 1]])
            summary.kills += 1
            summary.kills_of_all_ranks += len(victims) == 2
            summary.kills_during_a_save += run.is_saving()
            ranks.kill(victims)
            codes = ranks.wait(_END_SECONDS)
            survivors = [code for rank, code in enumerate(codes) if rank not in victims]
            summary.survivors += len(survivors)
            summary.survivors_ended_by_the_launcher += survivors.count(None)
            ranks.kill([0, 1])
            ranks.wait()
            continue
        if codes != [0, 0]:
            summary.differences.append(f"start {summary.starts} ended with {codes}: {run.log()[-2000:]}")
            return
        break
    summary.runs_completed += 1
    summary.differences += differences(run.result(), expected)
    sys.stdout.write(f"{summary.kills} kills, {summary.runs_completed} runs complete\n")
    sys.stdout.flush()


class Ranks:
    """The two processes of one start."""

    def __init__(self, processes: list[Any]) -> None:
        self._processes = processes

    def ended_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return all(process.exitcode is not None for process in self._processes)

    def kill(self, victims: list[int]) -> None:
        for rank in victims:
            process = self._processes[rank]
            if process.exitcode is None:
                os.kill(process.pid, signal.SIGKILL)

    def wait(self, seconds: float = 600.0) -> list[int | None]:
        """Exit codes; None for a process that does not end."""
        self.ended_within(seconds)
        return self.codes()

    def codes(self) -> list[int | None]:
        return [process.exitcode for process in self._processes]


class Run:
    """A command line and the folder that it writes to."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._folder = folder
        folder.mkdir(parents=True)
        self._argv = [
            *RECIPE.split(),
            *("--train-iters", str(options.iterations), "--save-interval", str(options.save_interval)),
            *("--save", str(folder / "checkpoints"), "--load", str(folder / "checkpoints")),
            *("--metrics-file", str(folder / "metrics.jsonl")),
            *(["--async-save"] if options.async_save else []),
        ]

    def start(self) -> Ranks:
        started = [
            processes.context().Process(target=_rank, args=(environment, self._argv, self._folder))
            for environment in processes.environments(2)
        ]
        for process in started:
            process.start()
        return Ranks(started)

    def is_saving(self) -> bool:
        staging = self._folder / "checkpoints" / ".unfinished"
        return staging.is_dir() and any(staging.iterdir())

    def log(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self._folder.glob("rank*.log")))

    def result(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Every tensor of the last checkpoint, and the metrics without times."""
        from megatron_async.checkpoint import folder
        from megatron_async.files import read_json_lines

        newest = folder.newest(self._folder / "checkpoints")
        assert newest is not None
        timing = {"iteration_ms", "tokens_per_s", "tflops_per_device", "bubble_share"}
        rows = read_json_lines(self._folder / "metrics.jsonl")
        kept = [{key: row[key] for key in row if key not in timing} for row in rows if "config" not in row]
        return tensors(newest.path), kept


def tensors(path: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint, by name."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader, load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    index = FileSystemReader(str(path)).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in index.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(state, storage_reader=FileSystemReader(str(path)), no_dist=True)
    return {name: tensor.numpy() for name, tensor in state.items()}


def differences(result: Any, expected: Any) -> list[str]:
    """What differs between two results of runs: tensors and metrics rows."""
    import numpy as np

    (tensors, rows), (expected_tensors, expected_rows) = result, expected
    found = [
        f"tensor {name} differs"
        for name in expected_tensors.keys() | tensors.keys()
        if name not in tensors or not np.array_equal(tensors[name], expected_tensors.get(name))
    ]
    for row, right in zip_longest(rows, expected_rows):
        if row != right:
            return [*found, f"the metrics files differ, first in {row} in place of {right}"]
    return found


def _rank(environment: dict[str, str], argv: list[str], folder: Path) -> None:
    processes.redirect_output(folder / f"rank{environment['RANK']}.log")
    os.environ |= environment
    from megatron_async import pretrain

    pretrain.run_to_exit(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
