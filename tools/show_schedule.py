# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Show a pipeline schedule: its table or picture, bubble share, live activations and weight versions.

python tools/show_schedule.py --schedule 2bw --stages 4 --microbatches 8
python tools/show_schedule.py --schedule wpipe --stages 4 --microbatches 8 --format png --output wpipe.png
"""

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from megatron_async.files import write_atomically
from megatron_async.schedules import (
    SCHEDULES,
    StageCosts,
    make_schedule,
    schedule_problems,
    simulate,
    validate,
)
from megatron_async.schedules.render import to_json, to_png, to_svg, to_text, to_trace

FORMATS = ("text", "json", "svg", "png", "trace")
NEEDS_OUTPUT = ("svg", "png")


class ArgumentError(Exception):
    """Message of the argument parser; kept so that it can be reported with the other problems."""


class Parser(argparse.ArgumentParser):
    """Argument parser that raises instead of leaving the process at the first problem."""

    def error(self, message: str) -> NoReturn:
        raise ArgumentError(message)


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for, checked."""

    schedule: str
    stages: int
    microbatches: int
    batches: int
    costs: StageCosts
    transfer: float
    format: str
    output: Path | None


def build_parser() -> Parser:
    """All values are text here: they are checked together, so that every problem is reported at once."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--schedule", metavar="S", help=f"required; one of {', '.join(SCHEDULES)}")
    parser.add_argument("--stages", metavar="P", help="required; pipeline stages (ranks)")
    parser.add_argument("--microbatches", metavar="M", help="required; micro-batches per batch")
    parser.add_argument("--batches", metavar="N", default="4", help="batches to plan (default: 4)")
    parser.add_argument(
        "--times",
        metavar="F,B,U",
        default="1,2,0",
        help="times of forward and backward of one micro-batch through one rank's layers, and of the update"
        " (default: 1,2,0)",
    )
    parser.add_argument(
        "--transfer", metavar="T", default="0", help="time of an activation or gradient between two ranks (default: 0)"
    )
    parser.add_argument("--format", default="text", help=f"one of {', '.join(FORMATS)} (default: text)")
    parser.add_argument("--output", metavar="FILE", help="write to this file; svg and png need it")
    return parser


def parse_arguments(arguments: list[str]) -> Request:
    """Check the command line.

    Raises:
        ValueError: one line for each problem.
    """
    try:
        values, unknown = build_parser().parse_known_args(arguments)
    except ArgumentError as error:
        raise ValueError(str(error)) from error
    problems = [f"unknown argument {argument!r}" for argument in unknown]
    stages = _parse_count("--stages", values.stages, problems)
    microbatches = _parse_count("--microbatches", values.microbatches, problems)
    batches = _parse_count("--batches", values.batches, problems)
    if values.schedule is None:
        problems.append("--schedule is required")
    elif values.schedule not in SCHEDULES or None not in (stages, microbatches, batches):
        # A wrong name is reported even while numbers are missing.
        problems += schedule_problems(
            values.schedule, stages=stages or 1, microbatches=microbatches or 1, batches=batches or 1
        )
    costs, transfer = _parse_times(values.times, problems), _parse_transfer(values.transfer, problems)
    if values.format not in FORMATS:
        problems.append(f"--format {values.format!r}: choose one of {', '.join(FORMATS)}")
    elif values.format in NEEDS_OUTPUT and values.output is None:
        problems.append(f"--format {values.format} needs --output FILE")
    if values.output is not None:
        if not Path(values.output).absolute().parent.is_dir():
            problems.append(f"--output {values.output}: its folder does not exist")
        elif Path(values.output).is_dir():
            problems.append(f"--output {values.output}: is a folder, give the name of a file")
    if problems or stages is None or microbatches is None or batches is None or costs is None or transfer is None:
        raise ValueError("\n".join(problems))
    return Request(
        schedule=values.schedule,
        stages=stages,
        microbatches=microbatches,
        batches=batches,
        costs=costs,
        transfer=transfer,
        format=values.format,
        output=None if values.output is None else Path(values.output),
    )


def _parse_count(name: str, text: str | None, problems: list[str]) -> int | None:
    if text is None:
        problems.append(f"{name} is required")
        return None
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        problems.append(f"{name} {text!r}: must be a whole number of at least 1")
        return None
    return int(text)


def _parse_times(text: str, problems: list[str]) -> StageCosts | None:
    try:
        forward, backward, update = map(float, text.split(","))
        if not (forward > 0 and backward > 0 and update >= 0 and math.isfinite(forward + backward + update)):
            raise ValueError
    except ValueError:
        problems.append(f"--times {text!r}: must be three numbers F,B,U with F > 0, B > 0 and U >= 0")
        return None
    return StageCosts(forward=forward, backward=backward, update=update)


def _parse_transfer(text: str, problems: list[str]) -> float | None:
    try:
        transfer = float(text)
        if not (transfer >= 0 and math.isfinite(transfer)):
            raise ValueError
    except ValueError:
        problems.append(f"--transfer {text!r}: must be a number, not negative")
        return None
    return transfer


def render(request: Request) -> bytes:
    """The contents of the output."""
    schedule = make_schedule(request.schedule, request.stages, request.microbatches, request.batches)
    validate(schedule)
    result = simulate(schedule, request.costs, transfer=request.transfer)
    match request.format:
        case "png":
            return to_png(schedule, result)
        case "svg":
            return to_svg(schedule, result).encode()
        case "json":
            return (json.dumps(to_json(schedule, result)) + "\n").encode()
        case "trace":
            return (json.dumps(to_trace(schedule, result)) + "\n").encode()
        case _:
            return (to_text(schedule, result) + "\n").encode()


def main(arguments: list[str]) -> int:
    """Exit status: 0, or 2 for wrong arguments."""
    try:
        request = parse_arguments(arguments)
    except ValueError as error:
        lines = "\n".join(f"  - {line}" for line in str(error).splitlines())
        print(f"show_schedule.py: wrong arguments\n{lines}", file=sys.stderr)
        return 2
    contents = render(request)
    if request.output is None:
        sys.stdout.buffer.write(contents)
    else:
        write_atomically(request.output, contents)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
