# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
r"""The fastest layouts of a run on a number of devices: memory, time, what keeps devices idle, and the command line.

megatron-async plan --devices 64 -- --model moe-10b-hybrid --bf16 --optimizer muon --global-batch-size 512 \
    --staleness-correction error-feedback

Arguments after "--" are those of megatron_async.pretrain without the layout. The search tries every pipeline, tensor,
expert and data parallel size, schedule, micro-batch size and full recomputation, each with balanced stages. It keeps a
micro-batch size and a recomputation that the run gives; --schedules replaces the run's --pipeline-schedule. For several
numbers of devices the table has the best layout of each schedule.

megatron-async plan --measure my-device.toml    describes this machine's device, for --plan-device
"""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from megatron_async import platform
from megatron_async.cli import make_parser, refuse
from megatron_async.config.command_line import value_of, without
from megatron_async.planning import devices, split
from megatron_async.planning.timing import CAUSES
from megatron_async.platform import gpu
from megatron_async.schedules import SCHEDULES

if TYPE_CHECKING:
    from megatron_async.planning.search import Outcome

_LAYOUT = (
    "pipeline_model_parallel_size",
    "tensor_model_parallel_size",
    "expert_model_parallel_size",
    "pipeline_balance",
    *split.ARGUMENTS,
)
_SCHEDULES = [name for name, own in SCHEDULES.items() if not own.update_per_microbatch]
"""Schedules with batches of several micro-batches."""
_OF_DELAYED = ("--correction-strength", "--correct-matrices-only", "--sync-start-iters", "--sync-cooldown-iters")
"""Options that synchronous schedules refuse, beside --staleness-correction."""
_WIDTH = 190


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    cut = argv.index("--") if "--" in argv else len(argv)
    own, run = argv[:cut], argv[cut + 1 :]
    parser = make_parser("plan", __doc__)
    sizes: dict[str, Any] = {"type": int, "nargs": "+", "metavar": "N"}
    add, known = parser.add_argument, f"{', '.join(devices.NAMES)} or a file (default: %(default)s)"
    add("--devices", **sizes, help="devices of a job; several plan several jobs")
    add("--schedules", nargs="+", choices=_SCHEDULES, help="schedules (default: all that fit the model)")
    add("--plan-device", metavar="DEVICE", default=devices.DEFAULT, help=known)
    add("--tensor", **sizes, default=[1, 2, 4, 8], help="sizes to try (default: 1 2 4 8)")
    add("--largest-pipeline", type=int, metavar="P", default=16, help="most stages to try (default: %(default)s)")
    add("--rows", type=int, metavar="N", default=20, help="rows of the table (default: %(default)s)")
    add("--measure", type=Path, metavar="FILE", help="measure this machine's device and write its file")
    options = parser.parse_args(own)
    flags = {f"--{name.replace('_', '-')}" for name in _LAYOUT} & {word.partition("=")[0] for word in run}
    problems = [f"{flag} belongs to the layout, which is searched: leave it out" for flag in sorted(flags)]
    if "|" in (value_of(run, "--hybrid-layer-pattern") or ""):
        problems.append("| in --hybrid-layer-pattern belongs to the layout, which is searched: leave it out")
    numbers = [*(options.devices or [1]), *options.tensor, options.largest_pipeline, options.rows]
    if min(numbers) < 1:
        problems.append("--devices, --tensor, --largest-pipeline and --rows must be at least 1")
    if options.measure is None and not (options.devices and run):
        problems.append("give --devices and, after --, the run: --devices 8 -- --model smollm2-135m --bf16")
    try:
        options.device = devices.find(options.plan_device)
        node = options.device.devices_per_node
        problems += [
            f"--devices {number}: {node} devices make a node of --plan-device; give at most {node}, or a multiple"
            for number in options.devices or []
            if number > node and number % node
        ]
    except ValueError as error:
        problems.append(f"--plan-device {error}")
    if problems:
        parser.error("; ".join(problems))
    return options, run


def _table(outcomes: "Sequence[Outcome]", tokens: int) -> Table:
    made = Table(title="fastest first; idle: share of the time of all devices, by cause")
    layouts = ("devices", "schedule", "PP x TP x EP x DP", "micro-batch", "recompute")
    for heading in (*layouts, "GiB", "s/batch", "tokens/s", "idle", *CAUSES, "split"):
        made.add_column(heading, justify="left" if heading in ("schedule", "split") else "right", no_wrap=True)
    for own in outcomes:
        layout, time = own.layout, own.time
        recompute = "full" if layout.recompute else ""
        made.add_row(
            *(str(own.devices), layout.schedule, layout.sizes, str(layout.micro_batch), recompute),
            *(f"{own.bytes / 2**30:.1f}", f"{time.seconds:.3g}", f"{tokens / time.seconds:,.0f}", f"{time.bubble:.1%}"),
            *(f"{time.idle[cause] / time.seconds:.1%}" for cause in CAUSES),
            own.split[1] if layout.pipeline > 1 else "",
        )
    return made


def _command(outcome: "Outcome", run: Sequence[str], per_node: int) -> list[str]:
    """The command line of a layout, without options that it replaces or refuses."""
    words = outcome.layout.words(outcome.split)
    left_out = [word for word in words if word.startswith("--")]
    if not SCHEDULES[outcome.layout.schedule].delayed:
        left_out += ["--staleness-correction", *_OF_DELAYED]
    kept = without(run, left_out)
    nodes = max(1, outcome.devices // per_node)
    launch = ["torchrun", "--nnodes", str(nodes), "--nproc-per-node", str(outcome.devices // nodes)]
    return [*launch, "-m", "megatron_async.pretrain", *kept, *words]


def _problems(command: Sequence[str], devices_of_job: int) -> tuple[str, ...]:
    """What a run would say about a command line."""
    from megatron_async.config import arguments

    os.environ["WORLD_SIZE"] = str(devices_of_job)
    words = command[command.index("megatron_async.pretrain") + 1 :]
    try:
        arguments.parse([*words, "--dry-run"])
    except arguments.ArgumentProblems as wrong:
        return wrong.problems
    return ()


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 if no layout fits or a run would refuse those that do, 2 for wrong arguments."""
    options, run = _parse(list(sys.argv[1:] if argv is None else argv))
    gpu.set_environment(one_queue=True)
    platform.activate_or_exit(platform.choose(value_of(run, "--device") or "auto")[0])
    if options.measure is not None:
        from megatron_async.planning.measure import device_of_this_machine

        devices.write(options.measure, device_of_this_machine(options.measure.stem))
        print(f"wrote {options.measure}: use it with --plan-device {options.measure}")
        return 0
    return _search(options, run)


def _search(options: argparse.Namespace, run: list[str]) -> int:
    from megatron_async.config import arguments
    from megatron_async.planning.resolve import precision_of
    from megatron_async.planning.search import Search

    os.environ["WORLD_SIZE"] = "1"
    alone = ["--pipeline-schedule", "1f1b", "--staleness-correction", "none", "--plan-device", options.plan_device]
    try:
        base = arguments.parse([*without(run, _OF_DELAYED), *alone, "--dry-run"])
    except arguments.ArgumentProblems as wrong:
        return refuse("plan", "nothing was planned", wrong.problems)
    base.staleness_correction = value_of(run, "--staleness-correction") or "none"
    base.correct_matrices_only = "--correct-matrices-only" in run
    given = value_of(run, "--micro-batch-size")
    search = Search(
        base,
        options.device,
        micro_batches=[1, 2, 4, 8] if given is None else [base.micro_batch_size],
        recompute=[False, True] if base.recompute_granularity is None else [False],
    )
    tied = not base.untie_embeddings_and_output_weights
    schedules = options.schedules or [name for name in _SCHEDULES if SCHEDULES[name].tied_embeddings or not tied]
    device = options.device
    speed = device.speed(precision_of(base)) / 1e12
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    console.print(f"{device.description}: {speed:.4g} TFLOP/s in use ({device.efficiency_source})", soft_wrap=True)
    rows: list[Outcome] = []
    best: list[Outcome] = []
    for number in options.devices:
        found = search.best(number, schedules, options.tensor, options.largest_pipeline)
        refused: set[str] = set()
        for own in found:
            if not (problems := _problems(_command(own, run, device.devices_per_node), number)):
                best.append(own)
                break
            if problems[0] not in refused:
                refused.add(problems[0])
                console.print(f"{number} devices: {own.layout} would be refused. {problems[0]}", soft_wrap=True)
        rows += found[: options.rows] if len(options.devices) == 1 else _first_of_each(found)
        if not found:
            console.print(f"{number} devices: nothing fits. {search.nearest_text()}", soft_wrap=True)
    if not rows:
        return 1
    console.print(_table(rows, base.global_batch_size * base.seq_length))
    if len(options.devices) == 1:
        compared = ", ".join(
            f"{own.layout.schedule} {own.time.seconds:.4g} s (+{own.time.seconds / found[0].time.seconds - 1:.1%})"
            for own in _first_of_each(found)
        )
        console.print(f"best of each schedule: {compared}", soft_wrap=True)
    for own in best:
        command = shlex.join(_command(own, run, device.devices_per_node))
        console.print(f"fastest on {own.devices} devices:\n{command}", soft_wrap=True, markup=False)
    return 0 if best else 1


def _first_of_each(outcomes: "Sequence[Outcome]") -> "list[Outcome]":
    """The best of each schedule."""
    best: dict[str, Outcome] = {}
    for own in outcomes:
        best.setdefault(own.layout.schedule, own)
    return list(best.values())


if __name__ == "__main__":
    sys.exit(main())
