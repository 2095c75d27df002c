# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
r"""Memory and time of a run on several layouts, numbers of devices and schedules.

python tools/plan_run.py --devices 64 --memory-gib 80 --tflops 400 -- --model moe-10b-hybrid --bf16 \
    --pipeline-schedule 2bw --staleness-correction error-feedback --optimizer muon --global-batch-size 512

Arguments after "--" are those of megatron_async.pretrain without the layout. Every pipeline size that divides the
devices is tried, and expert sizes in powers of two. One layout in detail: the same command line with --dry-run.

Several numbers of devices or schedules get a row each, with their fastest layout that fits:

python tools/plan_run.py --devices 64 256 1024 --schedules 1f1b 2bw wpipe -- --model moe-10b-hybrid --bf16 ...
"""

import argparse
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import astuple, dataclass

from rich.console import Console
from rich.table import Table

from megatron_async import platform
from megatron_async.config.command_line import value_of
from megatron_async.schedules import SCHEDULES


@dataclass(frozen=True, slots=True)
class Layout:
    """Pipeline, tensor and expert sizes."""

    pipeline: int
    tensor: int
    expert: int

    def words(self) -> list[str]:
        words = ["--pipeline-model-parallel-size", str(self.pipeline)]
        words += ["--tensor-model-parallel-size", str(self.tensor)]
        if self.tensor > 1:
            words.append("--sequence-parallel")
        return words + ["--expert-model-parallel-size", str(self.expert)]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Estimates for one layout: largest bytes on a device, seconds per batch, bubble; or the reason that forbids it."""

    devices: int
    schedule: str
    layout: Layout
    bytes: int = 0
    seconds: float = 0.0
    bubble: float = 0.0
    objection: str = ""


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    cut = argv.index("--") if "--" in argv else len(argv)
    own, run = argv[:cut], argv[cut + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", required=True, help="devices of the job")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, help="schedules (default: that of the run)")
    parser.add_argument("--memory-gib", type=float, default=80.0, help="memory of a device (default: %(default)s)")
    parser.add_argument("--tflops", type=float, help="TFLOP/s of a device in use (default: as --dry-run assumes)")
    parser.add_argument("--tensor", type=int, nargs="+", default=[1], help="tensor-parallel sizes to try (default: 1)")
    parser.add_argument("--largest-pipeline", type=int, default=16, help="default: %(default)s")
    options = parser.parse_args(own)
    if min(options.devices) < 1 or options.memory_gib <= 0 or (options.tflops is not None and options.tflops <= 0):
        parser.error("--devices, --memory-gib and --tflops must be positive")
    if not run:
        parser.error("give the run after --, for instance: -- --model smollm2-135m --bf16")
    return options, run


def _has_experts(run: list[str]) -> bool:
    from megatron_async.models.presets import PRESETS

    preset = PRESETS.get(value_of(run, "--model") or "")
    return "--num-experts" in run or (preset is not None and "num_experts" in preset.arguments)


def layouts(devices: int, tensor_sizes: list[int], largest_pipeline: int, experts: bool) -> Iterator[Layout]:
    """Layouts whose sizes divide the devices."""
    powers = [1 << exponent for exponent in range(devices.bit_length())]
    for tensor in tensor_sizes:
        for pipeline in range(1, min(devices, largest_pipeline) + 1):
            if devices % (tensor * pipeline) == 0:
                replicas = devices // (tensor * pipeline)
                for expert in powers if experts else [1]:
                    if (replicas * tensor) % (expert * tensor) == 0:
                        yield Layout(pipeline, tensor, expert)


def outcome(devices: int, schedule: str, layout: Layout, run: list[str], flops: float | None) -> Outcome:
    """Plan one layout; nothing is started."""
    from megatron_async.config import arguments
    from megatron_async.planning.estimate import plan

    os.environ["WORLD_SIZE"] = str(devices)
    pipelined = layout.pipeline > 1 and SCHEDULES[schedule].delayed
    words = ["--pipeline-schedule", schedule if layout.pipeline > 1 else "1f1b"]
    words += [] if pipelined else ["--staleness-correction", "none"]
    try:
        args = arguments.parse([*run, *layout.words(), *words, "--dry-run"])
    except arguments.ArgumentProblems as wrong:
        return Outcome(devices, schedule, layout, objection=wrong.problems[0])
    result = plan(args, flops)
    largest = max(sum(held.values()) for held in result.bytes_by_kind)
    numbers = largest, result.seconds_per_batch, result.simulated.steady_bubble_share
    return Outcome(devices, schedule, layout, *numbers)


def table(outcomes: list[Outcome], options: argparse.Namespace) -> Table:
    """Outcomes that fit on a device first, then by time; of several devices or schedules the first of each."""
    made = Table(title=f"devices of {options.memory_gib:g} GiB")
    for heading in (
        "devices",
        "schedule",
        "pipeline",
        "tensor",
        "expert",
        "memory GiB",
        "fits",
        "bubble",
        "s per batch",
    ):
        made.add_column(heading, justify="right")
    limit = options.memory_gib * 2**30
    rows = sorted(outcomes, key=lambda row: (row.bytes > limit, row.seconds))
    groups = [(devices, schedule) for devices in options.devices for schedule in options.schedules]
    if len(groups) > 1:
        best = [[row for row in rows if (row.devices, row.schedule) == group][:1] for group in groups]
        rows = [row for first in best for row in first]
    for row in rows:
        sizes = [str(row.devices), row.schedule, *map(str, astuple(row.layout))]
        fits = "yes" if row.bytes <= limit else "no"
        made.add_row(*sizes, f"{row.bytes / 2**30:.1f}", fits, f"{row.bubble:.1%}", f"{row.seconds:.3g}")
    return made


def main(argv: list[str]) -> int:
    """Exit status: 0, 1 if no layout is possible, 2 for wrong arguments."""
    options, run = _parse(argv)
    warnings.filterwarnings("ignore", module=r"megatron\.")
    options.schedules = options.schedules or [value_of(run, "--pipeline-schedule") or "1f1b"]
    device = value_of(run, "--device") or "auto"
    platform.activate_or_exit(platform.choose(device)[0])
    flops = None if options.tflops is None else options.tflops * 1e12
    experts = _has_experts(run)
    results = [
        outcome(devices, schedule, layout, run, flops)
        for devices in options.devices
        for schedule in options.schedules
        for layout in layouts(devices, options.tensor, options.largest_pipeline, experts)
    ]
    possible = [result for result in results if not result.objection]
    Console(width=None if sys.stdout.isatty() else 100).print(table(possible, options))
    refused = [result for result in results if result.objection]
    for result in refused[:3] if possible else refused:
        place = f"{result.devices} devices, {result.schedule}, pipeline {result.layout.pipeline}"
        print(f"not possible, {place}, expert {result.layout.expert}: {result.objection}")
    return 0 if possible else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
