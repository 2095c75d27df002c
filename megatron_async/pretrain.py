# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Entry point: `torchrun --nproc-per-node N -m megatron_async.pretrain [any Megatron-LM argument] [ours]`."""

# The imports below take seconds.
from megatron_async.launcher import end_with_launcher, is_first_rank

if __name__ == "__main__":
    end_with_launcher()

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

from megatron_async import platform
from megatron_async.config.command_line import value_of
from megatron_async.mcore import UnsupportedVersion
from megatron_async.platform import gpu, job
from megatron_async.schedules import SCHEDULES
from megatron_async.training import provenance
from megatron_async.training.signals import ALWAYS, FAILED, StopRequests

USAGE_ERROR = 2


def main(argv: Sequence[str], stops: StopRequests | None = None) -> int:
    """Carry out a command line; return the exit status."""
    stops = stops or StopRequests()
    if "--explain" in argv:
        return _explain([word for word in argv if word != "--explain"])
    if value_of(argv, "--model") == "list":
        return _list_presets()
    schedule = SCHEDULES.get(value_of(argv, "--pipeline-schedule") or "1f1b")
    tensor_parallel = value_of(argv, "--tensor-model-parallel-size") not in (None, "1")
    gpu.set_environment(one_queue=tensor_parallel and not (schedule and schedule.delayed))
    try:
        _rendezvous = _compare_ranks(argv)  # kept until the end: it may hold the server of the job's store
    except job.Differences as different:
        return _refuse(different.problems, "hosts of the job")
    try:
        device, _ = platform.choose(value_of(argv, "--device") or "auto")
    except ValueError:
        device = "cpu"  # reported with every other problem below
    try:
        platform.activate(device)
    except UnsupportedVersion as unsupported:
        return _refuse(str(unsupported).splitlines(), "installed packages")

    from megatron_async.config import arguments

    try:
        args = arguments.parse(argv)
    except arguments.ArgumentProblems as wrong:
        return _refuse(wrong.problems, "arguments")
    if is_first_rank():
        print("".join(f"> {notice}\n" for notice in args._notices), end="", flush=True)
    stops.listen(args.exit_signal)
    stops.limit(args.exit_duration_in_mins)

    if args.dry_run:
        return _dry_run(args)

    from megatron_async.training import run

    return run.pretrain(args, stops)


def _compare_ranks(argv: Sequence[str]) -> Any:
    """Raise Differences on every rank of a run whose ranks differ; return the store of the job."""
    trains = value_of(argv, "--optimizer") != "list" and not {"--dry-run", "--help", "-h"} & set(argv)
    if not trains or job.world_size() == 1:
        return None
    gpu_matters = value_of(argv, "--device") != "cpu"
    own = job.Rank(platform.sees_gpu() if gpu_matters else None, provenance.of_job(), argv)
    minutes = value_of(argv, "--distributed-timeout-minutes") or ""
    return job.compare(own, timedelta(minutes=int(minutes) if minutes.isdigit() else 10))


def _explain(words: Sequence[str]) -> int:
    """Print the status of options; an unknown one is an error of use."""
    from megatron_async.config.contract.explain import explain

    text, known = explain(words)
    if is_first_rank():
        print(text)
    return 0 if known else USAGE_ERROR


def _list_presets() -> int:
    if is_first_rank():
        from rich.console import Console

        from megatron_async.planning.listing import preset_table

        Console(width=None if sys.stdout.isatty() else 150).print(preset_table())
    return 0


def _dry_run(args: argparse.Namespace) -> int:
    if is_first_rank():
        from megatron_async.planning import dry_run

        dry_run.run(args)
    return 0


def _refuse(problems: Sequence[str], of: str) -> int:
    """Write a numbered list of problems on rank 0; return the exit status."""
    if is_first_rank():
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, 1))
        sys.stderr.write(f"megatron_async: {count} with the {of}; nothing was started.\n{lines}\n")
    return USAGE_ERROR


def _fail(error: BaseException) -> int:
    """Name the cause on this rank; add a traceback unless it is a known kind of fault."""
    from megatron_async.checkpoint.agreement import JointError, describe
    from megatron_async.data.iterators import OrderEnds
    from megatron_async.pipeline.executor import StageFailure
    from megatron_async.training.faults import TrainingFault

    if not isinstance(error, JointError | OrderEnds | StageFailure | TrainingFault):
        sys.excepthook(type(error), error, error.__traceback__)
    sys.stderr.write(f"megatron_async: rank {os.environ.get('RANK', '0')} failed: {describe(error)}\n")
    return FAILED


def run_to_exit(argv: Sequence[str]) -> NoReturn:
    """Carry out a command line and end this process with the exit status."""
    # Before any slow import, so that a signal during start-up is a request to stop like any other.
    requests = StopRequests(ALWAYS)
    try:
        status = main(argv, requests)
    except Exception as error:
        status = _fail(error)
    sys.stdout.flush()
    sys.stderr.flush()
    if status == FAILED:
        # Other ranks are gone or stuck, and an ordinary exit would wait for them.
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    run_to_exit(sys.argv[1:])
