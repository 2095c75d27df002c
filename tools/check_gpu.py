# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Check the package on this machine's GPUs and write one report to send: runs/check-gpu/report.md and report.json.

python tools/check_gpu.py            (make check-gpu)

Device tests; parity of schedules and layouts with the delay oracle; 2bw beside Megatron's 1f1b and compute alone; idle
time by cause; memory beside the plan; the steps that a delayed schedule adds. Without a GPU a small emulated form runs
on CPU processes over gloo, which says nothing about a GPU. Exit status 1 where a section failed.
"""

import argparse
import functools
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/ and tests/ are not installed

from benchmarks import idle, processes, results
from benchmarks.check_report import Outcome, Result, Section, perform, write
from benchmarks.contenders import LIMIT
from benchmarks.processes import Pool
from benchmarks.schedules import measure
from benchmarks.stack import Pace, emulated_cell
from megatron_async.doctor import __main__ as doctor
from megatron_async.platform.packages import TRANSFORMER_ENGINE
from tests.distributed import matrix
from tests.distributed.jobs import SMALL_CORPUS
from tests.distributed.test_matrix import CELLS, NAMES

ROOT = Path(__file__).resolve().parents[1]
_JOBS = "benchmarks.device_jobs"
_WARM_UP, _COOL_DOWN = 4, 3
"""Batches that compile, fill and drain and do not count."""
_LARGEST_PIPELINE = 8
_MEMORY_WITHIN = 0.25
"""The planner takes activations from below, and one process's caches are not in the plan."""

_DATA = "--mock-data --tokenizer-type NullTokenizer --eval-iters 0 --eval-interval 1000 --lr 1e-4 --log-interval 1000"
_MODEL = f"""--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --attention-dropout 0
    --hidden-dropout 0 --untie-embeddings-and-output-weights --optimizer adam --clip-grad 1.0 {_DATA}"""
_ON_CPU = f"""{_MODEL} --device cpu --num-layers 4 --hidden-size 192 --num-attention-heads 6 --ffn-hidden-size 512
    --seq-length 128 --max-position-embeddings 128 --micro-batch-size 2 --vocab-size 1023"""
_ON_GPU = f"""{_MODEL} --device cuda --bf16 --hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size 5632
    --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --vocab-size 32767"""
_LAYERS_OF_A_GPU = 4
_PACE = Pace(20.0, 40.0)
"""Emulated milliseconds of a forward and a backward."""
_EMULATED_CELLS = (
    "1f1b-DP2-dense-fp32-sharded-adam",
    "2bw-PP2-dense-fp32-plain-muon",
    "wpipe-PP2-dense-fp32-plain-muon",
)
_SMALL = "tests.distributed.jobs:train"
"""The job of a cell on few mock documents: quicker, for cells in fp32, which agree whatever the data."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is to check.

    Attributes:
        gpus: 0 for the emulated form.
        folder: of the report.
    """

    gpus: int
    folder: Path

    @property
    def device(self) -> str:
        return "cuda" if self.gpus else "cpu"

    @property
    def stages(self) -> int:
        """Stages of the pipeline that is measured: a power of two; 1 where there is one GPU."""
        count = min(self.gpus, _LARGEST_PIPELINE) if self.gpus else 2
        return 1 << (count.bit_length() - 1)

    @property
    def schedules(self) -> tuple[str, ...]:
        """The schedules that are measured; 2bw needs two stages."""
        return ("1f1b", "2bw") if self.stages > 1 else ("1f1b",)

    @property
    def engine(self) -> str:
        return f"--transformer-impl {'transformer_engine' if self.gpus and TRANSFORMER_ENGINE.usable else 'local'}"

    @property
    def form(self) -> str:
        if self.gpus:
            names = sorted({torch.cuda.get_device_name(number) for number in range(self.gpus)})
            return f"Measured on {self.gpus} GPU(s): {', '.join(names)}; {self.engine}."
        return (
            "**Emulated.** There is no GPU here: CPU processes over gloo, stages that sleep where speed is measured. "
            "Nothing in this report was measured on a GPU."
        )

    def line(self, schedule: str, batches: int) -> list[str]:
        """Command line of a run of so many batches of 2P micro-batches."""
        model = f"{_ON_GPU} --num-layers {_LAYERS_OF_A_GPU * self.stages} {self.engine}" if self.gpus else _ON_CPU
        size = 1 if self.gpus else 2
        layout = f"--pipeline-model-parallel-size {self.stages} --pipeline-schedule {schedule}"
        return f"{model} {layout} --train-iters {batches} --global-batch-size {2 * self.stages * size}".split()


def device_tests(machine: Machine) -> Result:
    """tests/gpu in a process of its own."""
    if not machine.gpus:
        return Result(skipped="tests/gpu needs a GPU.")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    passed = re.search(r"(\d+) passed", done.stdout)
    problems = [] if done.returncode == 0 else [f"pytest ended with status {done.returncode}"]
    return Result({"passed": int(passed[1]) if passed else None}, f"```\n{done.stdout[-4000:]}\n```", problems)


def environment() -> Result:
    """The doctor's findings on this machine."""
    (here,) = doctor.examine()
    rows = [[f.check, f.level, f.found, f.change] for f in here.findings]
    problems = [f"{f.check}: {f.found}. {f.change}" for f in here.findings if f.level == "FAIL"]
    return Result({"findings": rows}, results.table(["check", "", "found", "what to change"], rows), problems)


def parity(machine: Machine) -> Result:
    """The cells that the tests take from the parity matrix, as far as they fit the GPUs; a few in the emulated form."""
    if machine.gpus == 1:
        return Result(skipped="Every layout of the matrix needs at least two GPUs.")
    names, job = (NAMES, matrix.TRAIN) if machine.gpus else (_EMULATED_CELLS, _SMALL)
    # Megatron's own schedule with tensor parallelism needs processes with one hardware queue, delayed ones with more.
    chosen = [
        cell
        for cell in map(CELLS.__getitem__, names)
        if cell.ranks <= (machine.gpus or 2) and not (cell.schedule == "1f1b" and "tensor-model" in cell.pipeline)
    ]
    # The reference computes in torch; Transformer Engine's kernels round differently.
    more = f"--device {machine.device} --transformer-impl local"
    figures, rows, problems = dict[str, float](), [], []
    with Pool(SMALL_CORPUS) as pool:

        def run(arguments: str, ranks: int) -> Any:
            return pool.run(job, f"{arguments} {more}".split(), ranks=ranks, timeout=300)

        reference = functools.cache(run)
        for cell in chosen:
            try:
                figures[cell.name] = matrix.measure(cell, run, reference)
            except processes.JobFailed as failure:
                problems.append(f"{cell.name} did not run: {str(failure)[-1500:]}")
                continue
            rows.append([cell.name, f"{figures[cell.name]:.1e}", f"{cell.tolerance:.1e}"])
            if figures[cell.name] > cell.tolerance:
                problems.append(f"{cell.name} is {figures[cell.name]:.1e} off, allowed are {cell.tolerance:.1e}")
    text = results.table(["cell", "largest relative difference", "allowed"], rows)
    return Result({"differences": figures}, text, problems)


def speed(machine: Machine) -> Result:
    """2bw beside Megatron's 1f1b and compute alone; idle time by cause; on GPUs the peak of memory too."""
    figures = _on_gpus(machine) if machine.gpus else _emulated(machine)
    ms, problems = figures["ms"], []
    rows = [[name, f"{time:.1f}", f"{time / ms[LIMIT]:.3f}"] for name, time in ms.items()]
    text = (
        f"P = {machine.stages}, M = {2 * machine.stages}, medians on the slowest rank; the limit is compute alone.\n\n"
    )
    text += results.table(["", "ms of a batch", "times the limit"], rows)
    if machine.stages > 1:
        figures["speedup"] = ms["1f1b"] / ms["2bw"]
        text += f"\n2bw is {figures['speedup']:.3f} times as fast as 1f1b.\n"
        if figures["speedup"] < 1.0:
            problems.append(f"2bw takes {ms['2bw']:.1f} ms a batch, 1f1b {ms['1f1b']:.1f} ms")
    shares = [
        [f"{schedule}, rank {rank}", *(f"{share:.1%}" for share in found.values())]
        for schedule, ranks in figures["idle"].items()
        for rank, found in enumerate(ranks)
    ]
    text += "\nShares of the time of a rank:\n\n" + results.table(["", "compute", *idle.CAUSES], shares)
    return Result(figures, text, problems)


def _on_gpus(machine: Machine) -> dict[str, Any]:
    batches, steady = _WARM_UP + 12 + _COOL_DOWN, (_WARM_UP + 1, _WARM_UP + 3)
    figures: dict[str, Any] = {"ms": {}, "idle": {}, "peak_bytes": {}}
    with Pool(SMALL_CORPUS) as pool:
        for schedule in machine.schedules:
            line = [*machine.line(schedule, batches), *_spans(machine.folder / f"{schedule}.json")]
            ranks = pool.run(
                f"{_JOBS}:train", line, steady, machine.folder / schedule, ranks=machine.stages, timeout=900
            )
            figures["ms"][schedule] = max(_median(rank.batches) for rank in ranks)
            figures["idle"][schedule] = [rank.idle for rank in ranks]
            figures["peak_bytes"][schedule] = [rank.peak for rank in ranks]
        alone = pool.run("benchmarks.jobs:alone", machine.line("1f1b", batches), ranks=machine.stages, timeout=900)
    figures["ms"][LIMIT] = max(_median([batch for batch, *_ in batches]) for batches, _ in alone)
    return figures


def _spans(file: Path) -> list[str]:
    return ["--trace-file", str(file), "--trace-batches", "99"]


def _emulated(machine: Machine) -> dict[str, Any]:
    """Layers that sleep for the speed; a small run that computes for the idle time."""
    cell = emulated_cell(machine.stages, 2 * machine.stages, _PACE, rounds=1, batches=4)
    rows, absent = measure([cell], [LIMIT, "megatron-1f1b", "2bw"])
    if absent:
        raise RuntimeError("; ".join(f"{row['contender']}: {row['reason']}" for row in absent))
    ms = {row["contender"].removeprefix("megatron-"): row["ms_median"] for row in rows}
    batches, shares = _WARM_UP + 4 + _COOL_DOWN, dict[str, Any]()
    with Pool(SMALL_CORPUS) as pool:
        for schedule in machine.schedules:
            line = [*machine.line(schedule, batches), *_spans(machine.folder / f"{schedule}.json")]
            steady = (_WARM_UP, batches - _COOL_DOWN)
            shares[schedule] = [r.idle for r in pool.run(f"{_JOBS}:train", line, steady, None, ranks=machine.stages)]
    return {"ms": ms, "idle": shares}


def memory(machine: Machine, before: Sequence[Outcome]) -> Result:
    """Peak of each stage beside the plan: from the runs of `speed` on GPUs, from a run of its own on CPUs."""
    figures, rows, problems = dict[str, list[list[int]]](), [], []
    measured: dict[str, list[int]] = {}
    if machine.gpus:
        measured = next(
            (o.result.figures.get("peak_bytes", {}) for o in before if o.title == "Speed and idle time"), {}
        )
    with Pool(SMALL_CORPUS) as pool:
        for schedule in measured or machine.schedules[-1:]:
            line = machine.line(schedule, 3)
            peaks = measured.get(schedule) or pool.run(f"{_JOBS}:peak_on_cpu", line, ranks=machine.stages)
            plans = pool.run(f"{_JOBS}:planned", line, machine.stages, ranks=1)[0]
            figures[schedule] = [list(pair) for pair in zip(peaks, plans, strict=True)]
            for stage, (peak, plan) in enumerate(figures[schedule]):
                rows.append([f"{schedule}, stage {stage}", *(f"{size / 2**20:.1f}" for size in (peak, plan))])
                rows[-1].append(f"{peak / plan:.3f}")
                if abs(peak / plan - 1) > _MEMORY_WITHIN:
                    problems.append(f"{schedule}, stage {stage}: {peak:,} bytes measured, {plan:,} planned")
    return Result({"bytes": figures}, results.table(["", "measured MiB", "planned MiB", "ratio"], rows), problems)


def added_steps(machine: Machine) -> Result:
    """The steps that a delayed schedule adds, one by one."""
    with Pool() as pool:
        times = pool.run(f"{_JOBS}:steps_of_a_stage", machine.device, ranks=1, timeout=600)[0]
    rows = [[name, f"{found['ms']:.3f}", f"{found['host_ms']:.3f}"] for name, found in times.items()]
    return Result({"times": times}, results.table(["step", "ms", "host free after, ms"], rows))


def _median(batches: Sequence[float]) -> float:
    return statistics.median(batches[_WARM_UP:-_COOL_DOWN])


def sections(machine: Machine, before: Sequence[Outcome]) -> list[Section]:
    """All sections; `before` holds the outcomes of the earlier ones when a section runs."""
    compared = (["speedup"] if machine.stages > 1 else []) + (["peak_bytes"] if machine.gpus else [])
    return [
        Section("Environment", environment, ["findings"]),
        Section("Device tests", lambda: device_tests(machine), ["passed"]),
        Section("Parity with the delay oracle", lambda: parity(machine), ["differences"]),
        Section("Speed and idle time", lambda: speed(machine), ["ms", "idle", *compared]),
        Section("Memory beside the plan", lambda: memory(machine, before), ["bytes"]),
        Section("Steps that a delayed schedule adds", lambda: added_steps(machine), ["times"]),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 where a section failed, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/check-gpu"), help="of the report (default: %(default)s)"
    )
    parser.add_argument("--gpus", type=int, help="use only so many GPUs; 0 for the emulated form (default: all)")
    options = parser.parse_args(arguments)
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if options.gpus is not None and not 0 <= options.gpus <= there:
        parser.error(f"--gpus {options.gpus}: torch finds {there} here")
    machine = Machine(there if options.gpus is None else options.gpus, options.folder.absolute())
    os.environ[processes.DEVICE] = machine.device
    used, outcomes = results.machine(), list[Outcome]()
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(machine.form.replace("**", ""))
    parts = sections(machine, outcomes)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(parts[0].title, total=len(parts))
        for outcome, following in zip(perform(parts), [*parts[1:], parts[-1]], strict=True):
            outcomes.append(outcome)
            progress.update(task, advance=1, description=following.title)
            console.print(f"{outcome.title}: {outcome.status} ({outcome.seconds:.0f} s)")
            for problem in outcome.result.problems:
                console.print(f"  {problem}", markup=False)
    path = write(machine.folder, machine.form, used, outcomes)
    console.print(f"report: {path} (send it with report.json and, where there are any, trace_rank*.json)")
    return 1 if any(outcome.status == "failed" for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
