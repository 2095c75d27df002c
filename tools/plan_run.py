# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
r"""Memory and time of a run on several layouts.

python tools/plan_run.py --devices 64 --memory-gib 80 --tflops 400 -- --model moe-10b-hybrid --bf16 \
    --pipeline-schedule 2bw --staleness-correction error-feedback --optimizer muon --global-batch-size 512

After "--" comes a command line of megatron_async.pretrain without its layout. Every pipeline size that divides the
devices is tried, and expert sizes in powers of two. --dry-run prints one layout in detail.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from megatron_async import platform
from megatron_async.config.command_line import value_of


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

    layout: Layout
    bytes: int = 0
    seconds: float = 0.0
    bubble: float = 0.0
    objection: str = ""


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    cut = argv.index("--") if "--" in argv else len(argv)
    own, run = argv[:cut], argv[cut + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, required=True, help="devices of the job")
    parser.add_argument("--memory-gib", type=float, default=80.0, help="memory of a device (default: %(default)s)")
    parser.add_argument("--tflops", type=float, help="TFLOP/s of a device in use (default: as --dry-run assumes)")
    parser.add_argument("--tensor", type=int, nargs="+", default=[1], help="tensor-parallel sizes to try (default: 1)")
    parser.add_argument("--largest-pipeline", type=int, default=16, help="default: %(default)s")
    options = parser.parse_args(own)
    if options.devices < 1 or options.memory_gib <= 0 or (options.tflops is not None and options.tflops <= 0):
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


def outcome(layout: Layout, run: list[str], flops: float | None) -> Outcome:
    """Plan one layout; nothing is started."""
    from megatron_async.config import arguments
    from megatron_async.planning.estimate import plan

    schedule = ["--pipeline-schedule", "1f1b", "--staleness-correction", "none"] if layout.pipeline == 1 else []
    try:
        args = arguments.parse([*run, *layout.words(), *schedule, "--dry-run"])
    except arguments.ArgumentProblems as wrong:
        return Outcome(layout, objection=wrong.problems[0])
    result = plan(args, flops)
    largest = max(sum(held.values()) for held in result.bytes_by_kind)
    return Outcome(layout, largest, result.seconds_per_batch, result.simulated.steady_bubble_share)


def table(outcomes: list[Outcome], options: argparse.Namespace) -> Table:
    """One row for each possible layout, the fastest that fits first."""
    made = Table(title=f"{options.devices} devices of {options.memory_gib:g} GiB")
    for heading in ("pipeline", "tensor", "expert", "memory GiB", "fits", "bubble", "s per batch"):
        made.add_column(heading, justify="right")
    limit = options.memory_gib * 2**30
    for row in sorted(outcomes, key=lambda row: (row.bytes > limit, row.seconds)):
        sizes = [str(row.layout.pipeline), str(row.layout.tensor), str(row.layout.expert)]
        fits = "yes" if row.bytes <= limit else "no"
        made.add_row(*sizes, f"{row.bytes / 2**30:.1f}", fits, f"{row.bubble:.1%}", f"{row.seconds:.3g}")
    return made


def main(argv: list[str]) -> int:
    """Exit status: 0, 1 if no layout is possible, 2 for wrong arguments."""
    options, run = _parse(argv)
    warnings.filterwarnings("ignore", module=r"megatron\.")
    os.environ["WORLD_SIZE"] = str(options.devices)
    device = value_of(run, "--device") or "auto"
    platform.activate(platform.choose(device)[0])
    flops = None if options.tflops is None else options.tflops * 1e12
    tried = layouts(options.devices, options.tensor, options.largest_pipeline, experts=_has_experts(run))
    results = [outcome(layout, run, flops) for layout in tried]
    possible = [result for result in results if not result.objection]
    Console(width=None if sys.stdout.isatty() else 100).print(table(possible, options))
    refused = [result for result in results if result.objection]
    for result in refused[:3] if possible else refused:
        print(f"not possible, pipeline {result.layout.pipeline}, expert {result.layout.expert}: {result.objection}")
    return 0 if possible else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
