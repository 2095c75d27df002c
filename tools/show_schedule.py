# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Show a pipeline schedule: its table or picture, bubble share, live activations and weight versions.

python tools/show_schedule.py --schedule 2bw --stages 4 --microbatches 8
python tools/show_schedule.py --schedule wpipe --stages 4 --microbatches 8 --format png --output wpipe.png
"""

import argparse
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/ is not installed

from megatron_async.files import write_atomically
from megatron_async.schedules import (
    SCHEDULES,
    Schedule,
    SimulationResult,
    StageCosts,
    make_schedule,
    schedule_problems,
    simulate,
    validate,
)
from megatron_async.schedules.render import to_image, to_json, to_text, to_trace
from tools.arguments import make_parser, parse, refuse

FORMATS = ("text", "json", "svg", "png", "trace")
NEEDS_OUTPUT = ("svg", "png")


def build_parser() -> argparse.ArgumentParser:
    """All values are strings. `parse_arguments` checks them together and reports all problems at once."""
    parser = make_parser(__doc__)
    option = parser.add_argument
    option("--schedule", metavar="S", help=f"required; one of {', '.join(SCHEDULES)}")
    option("--stages", metavar="P", help="required; pipeline stages (ranks)")
    option("--microbatches", metavar="M", help="required; micro-batches per batch")
    option("--batches", metavar="N", default="4", help="batches in the table (default: 4)")
    option(
        "--times",
        metavar="F,B,U",
        default="1,2,0",
        help="time of a stage for the forward and the backward of a micro-batch and for an update (default: 1,2,0)",
    )
    option("--transfer", metavar="T", default="0", help="time of a transfer between two ranks (default: 0)")
    option("--format", default="text", help=f"one of {', '.join(FORMATS)} (default: text)")
    option("--output", metavar="FILE", help="output file; required for svg and png")
    return parser


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Parse and check the command line.

    Raises:
        ValueError: one line for each problem.
    """
    values, problems = parse(build_parser(), arguments)
    shape = {}
    for name in ("stages", "microbatches", "batches"):
        text = getattr(values, name)
        if text is None:
            problems.append(f"--{name} is required")
        elif not text.isascii() or not text.isdigit() or int(text) < 1:
            problems.append(f"--{name} {text!r}: must be a whole number of at least 1")
        else:
            shape[name] = int(text)
    if values.schedule is None:
        problems.append("--schedule is required")
    elif values.schedule not in SCHEDULES or len(shape) == 3:
        problems += schedule_problems(values.schedule, **{"stages": 1, "microbatches": 1, "batches": 1, **shape})
    times = _numbers(values.times, 3)
    if times is None or min(times[:2]) <= 0:
        problems.append(f"--times {values.times!r}: must be three numbers F,B,U with F > 0, B > 0 and U >= 0")
    transfer = _numbers(values.transfer, 1)
    if transfer is None:
        problems.append(f"--transfer {values.transfer!r}: must be a number of at least 0")
    problems += _output_problems(values.format, values.output)
    if problems:
        raise ValueError("\n".join(problems))
    return argparse.Namespace(**{**vars(values), **shape, "times": times, "transfer": transfer})


def _numbers(text: str, count: int) -> list[float] | None:
    """`count` finite numbers of at least 0, separated by commas; None for anything else."""
    try:
        numbers = list(map(float, text.split(",")))
    except ValueError:
        return None
    return numbers if len(numbers) == count and all(0 <= number < math.inf for number in numbers) else None


def _output_problems(file_format: str, output: str | None) -> list[str]:
    problems = []
    if file_format not in FORMATS:
        problems.append(f"--format {file_format!r}: choose one of {', '.join(FORMATS)}")
    elif file_format in NEEDS_OUTPUT and output is None:
        problems.append(f"--format {file_format} needs --output FILE")
    if output is not None:
        if not Path(output).absolute().parent.is_dir():
            problems.append(f"--output {output}: its folder does not exist")
        elif Path(output).is_dir():
            problems.append(f"--output {output}: is a folder, give the name of a file")
    return problems


def render(schedule: Schedule, result: SimulationResult, file_format: str) -> bytes:
    """Contents of the output."""
    match file_format:
        case "png" | "svg":
            return to_image(schedule, result, file_format)
        case "json" | "trace":
            data = to_json(schedule, result) if file_format == "json" else to_trace(schedule, result)
            return (json.dumps(data) + "\n").encode()
        case _:
            return (to_text(schedule, result) + "\n").encode()


def main(arguments: list[str]) -> int:
    """Exit status: 0, or 2 for wrong arguments."""
    try:
        values = parse_arguments(arguments)
    except ValueError as error:
        return refuse("show_schedule.py", error)
    schedule = make_schedule(values.schedule, values.stages, values.microbatches, values.batches)
    validate(schedule)
    result = simulate(schedule, StageCosts(*values.times), transfer=values.transfer[0])
    contents = render(schedule, result, values.format)
    if values.output is None:
        sys.stdout.buffer.write(contents)
    else:
        write_atomically(Path(values.output), contents)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
