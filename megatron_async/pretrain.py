# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Entry point: `torchrun --nproc-per-node N -m megatron_async.pretrain [any Megatron-LM argument] [ours]`."""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn

from megatron_async import platform
from megatron_async.config.command_line import value_of
from megatron_async.mcore import UnsupportedVersion
from megatron_async.training.signals import ALWAYS, FAILED, StopRequests

USAGE_ERROR = 2


def main(argv: Sequence[str], stops: StopRequests | None = None) -> int:
    """Run what the command line asks for; return the exit status."""
    stops = stops or StopRequests()
    # Megatron warns at import about optional packages; what is missing and needed is reported by name later.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    requested = value_of(argv, "--device") or "auto"
    try:
        device, _ = platform.choose(requested)
    except ValueError:
        device = "cpu"  # reported with every other problem below
    try:
        platform.activate(device)
    except UnsupportedVersion as unsupported:
        return _refuse(str(unsupported).splitlines(), "installed packages")

    from megatron_async.config import arguments

    if value_of(argv, "--model") == "list":
        return _list_presets()
    try:
        args = arguments.parse(argv)
    except arguments.ArgumentProblems as wrong:
        return _refuse(wrong.problems, "arguments")
    stops.listen(args.exit_signal)
    stops.limit(args.exit_duration_in_mins)

    if args.dry_run:
        return _dry_run(args)

    from megatron_async.training import run

    return run.pretrain(args, stops)


def _list_presets() -> int:
    if int(os.environ.get("RANK", "0")) == 0:
        from rich.console import Console

        from megatron_async.planning.listing import preset_table

        Console(width=None if sys.stdout.isatty() else 150).print(preset_table())
    return 0


def _dry_run(args: argparse.Namespace) -> int:
    if int(os.environ.get("RANK", "0")) == 0:
        from megatron_async.planning import dry_run

        dry_run.run(args)
    return 0


def _refuse(problems: Sequence[str], of: str) -> int:
    """Write a numbered list of problems on rank 0; return the exit status."""
    if os.environ.get("RANK", "0") == "0":
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, 1))
        sys.stderr.write(f"megatron_async: {count} with the {of}; nothing was started.\n{lines}\n")
    return USAGE_ERROR


def _fail(error: BaseException) -> int:
    """Name the cause on this rank; a traceback only where the cause is no known kind of fault."""
    from megatron_async.checkpoint.agreement import JointError, describe
    from megatron_async.pipeline.executor import StageFailure
    from megatron_async.training.faults import TooManySkips

    if not isinstance(error, JointError | StageFailure | TooManySkips):
        sys.excepthook(type(error), error, error.__traceback__)
    sys.stderr.write(f"megatron_async: rank {os.environ.get('RANK', '0')} failed: {describe(error)}\n")
    return FAILED


def run_to_exit(argv: Sequence[str]) -> NoReturn:
    """Run what the command line asks for and end this process with its exit status."""
    # Before anything slow is imported: a signal during start-up is a request like any other.
    requests = StopRequests(ALWAYS)
    try:
        status = main(argv, requests)
    except Exception as error:
        status = _fail(error)
    sys.stdout.flush()
    sys.stderr.flush()
    if status == FAILED:
        # Other ranks are gone or stuck: leaving in the ordinary way would wait for them.
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    run_to_exit(sys.argv[1:])
