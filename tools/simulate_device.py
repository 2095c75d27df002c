# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Simulate schedules on devices: what hosts, streams, hardware queues and collectives add to compute alone.

python tools/simulate_device.py --schedules 2bw,2bw-eager --stages 4,8,16 --policies host,when-known
python tools/simulate_device.py --trace trace.json --microbatches-per-stage 1,2 --queues one

Everything is simulated, nothing is measured. Times are in ms.
"""

import argparse
import itertools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/ is not installed

from benchmarks.device import (
    LEAST_BATCHES,
    POLICIES,
    Machine,
    StageTimes,
    recorded_times,
    simulate_device,
)
from megatron_async.schedules import SCHEDULES, make_schedule, schedule_problems
from tools.arguments import make_parser, parse, refuse

QUEUES = ("many", "one")
HEADER = ("schedule", "P", "M", "policy", "queues", "ms a batch", "ratio to compute alone", "added, by cause (ms)")
SHOWN = 0.05
"""Least ms of a cause in the table."""


@dataclass(frozen=True, slots=True)
class Case:
    """One row: a schedule, a policy and a number of hardware queues; a schedule without them does not fit."""

    schedule: str
    stages: int
    microbatches: int
    policy: str
    queues: str


def build_parser() -> argparse.ArgumentParser:
    """All values are strings. `parse_arguments` checks them together and reports all problems at once."""
    parser = make_parser(__doc__)
    option = parser.add_argument
    option("--schedules", default="2bw,2bw-eager", help="names of schedules (default: 2bw,2bw-eager)")
    option("--stages", help="pipeline stages P (default: 4,8, or those of the trace)")
    option("--microbatches-per-stage", default="1,2", help="M / P (default: 1,2)")
    option("--policies", default=",".join(POLICIES), help=f"of {', '.join(POLICIES)} (default: all)")
    option("--queues", default="many,one", help="hardware queues: many, one (default: both)")
    option("--times", default="20,40,5", help="forward and backward of a micro-batch, optimizer step (20,40,5)")
    option("--trace", metavar="FILE", help="take these times from a run's --trace-file: medians of each stage")
    option("--reduction", default="20", help="reduction of the gradients (20)")
    option("--norm", default="1", help="norm over all stages (1)")
    option("--gather", default="10", help="gather of the parameters (10)")
    option("--transfer", default="0", help="transfer between two stages (0)")
    option("--launch", default="0.005", help="host time of a launch (0.005)")
    option("--launches", default="2000", help="launches of a micro-batch, forward and backward (2000)")
    option("--step-launches", default="300", help="launches of an optimizer step (300)")
    option("--json", action="store_true", help="rows as JSON instead of a table")
    return parser


def parse_arguments(arguments: list[str]) -> tuple[list[Case], StageTimes | list[StageTimes], dict[str, Any]]:
    """The rows, the times of the stages, and the options of `Machine`.

    Raises:
        ValueError: one line for each problem.
    """
    values, problems = parse(build_parser(), arguments)

    def names(option: str, known: Sequence[str]) -> list[str]:
        given: list[str] = getattr(values, option).split(",")
        problems.extend(f"--{option} {name!r}: choose from {', '.join(known)}" for name in given if name not in known)
        return given

    def numbers(option: str, kind: type[int] | type[float], count: int | None = None, least: float = 0) -> list[Any]:
        text = getattr(values, option)
        try:
            found = [kind(word) for word in text.split(",")]
        except ValueError:
            found = []
        if not found or len(found) != (count or len(found)) or not all(least <= number < math.inf for number in found):
            word = "whole numbers" if kind is int else "numbers"
            problems.append(
                f"--{option.replace('_', '-')} {text!r}: must be {count or 'some'} {word} of at least {least}"
            )
            return [least] * (count or 1)
        return found

    reduction, gather = (numbers(option, float, 1)[0] for option in ("reduction", "gather"))
    forward, backward, step = numbers("times", float, 3)
    times: StageTimes | list[StageTimes] = StageTimes(
        forward=forward, backward=backward, step=step, reduction=reduction, gather=gather
    )
    if values.trace is not None:
        try:
            times = recorded_times(json.loads(Path(values.trace).read_text()), reduction=reduction, gather=gather)
            values.stages = values.stages or str(len(times))
            if values.stages != str(len(times)):
                problems.append(f"--stages {values.stages}: the trace has {len(times)} stages")
        except (OSError, ValueError) as error:
            problems.append(f"--trace {values.trace}: {error}")
    values.stages = values.stages or "4,8"
    stages, factors = numbers("stages", int, least=1), numbers("microbatches_per_stage", int, least=1)
    schedules, policies, queues = (
        names("schedules", tuple(SCHEDULES)),
        names("policies", tuple(POLICIES)),
        names("queues", QUEUES),
    )
    machine = {option: numbers(option, float, 1)[0] for option in ("norm", "transfer", "launch")}
    machine |= {option: numbers(option, int, 1, 1)[0] for option in ("launches", "step_launches")}
    if problems:
        raise ValueError("\n".join(problems))
    cases = []
    for count, factor, name in itertools.product(stages, factors, schedules):
        possible = not schedule_problems(name, stages=count, microbatches=factor * count, batches=LEAST_BATCHES)
        variants = itertools.product(policies, queues) if possible else [("", "")]
        cases += [Case(name, count, factor * count, *variant) for variant in variants]
    return cases, times, machine


def row(case: Case, times: StageTimes | list[StageTimes], machine: dict[str, Any]) -> dict[str, Any]:
    """Simulate a row."""
    shape = {"stages": case.stages, "microbatches": case.microbatches, "batches": LEAST_BATCHES}
    found: dict[str, Any] = {name: getattr(case, name) for name in Case.__slots__}
    if problems := schedule_problems(case.schedule, **shape):
        return found | {"problem": "; ".join(problems)}
    result = simulate_device(
        make_schedule(case.schedule, **shape),
        times,
        Machine(**machine, one_queue=case.queues == "one"),
        POLICIES[case.policy],
    )
    if result.batch_time is None:
        return found | {"problem": f"hangs: rank {min(result.hung)} in {result.hung[min(result.hung)]}"}
    return found | {
        "batch_time": result.batch_time,
        "compute_alone": result.limit,
        "ratio": result.batch_time / result.limit,
        "added": result.added,
    }


def line(found: dict[str, Any]) -> str:
    """A row of the table."""
    cells = [str(found[name]) for name in Case.__slots__]
    if "problem" in found:
        cells += ["", "", found["problem"]]
    else:
        causes = [f"{name} {time:+.1f}" for name, time in sorted(found["added"].items()) if abs(time) >= SHOWN]
        cells += [f"{found['batch_time']:.1f}", f"{found['ratio']:.3f}", ", ".join(causes)]
    return f"| {' | '.join(cells)} |"


def main(arguments: list[str]) -> int:
    """Exit status: 0, or 2 for wrong arguments."""
    try:
        cases, times, machine = parse_arguments(arguments)
    except ValueError as error:
        return refuse("simulate_device.py", error)
    if "--json" in arguments:
        print(json.dumps([row(case, times, machine) for case in cases]))
        return 0
    print(f"| {' | '.join(HEADER)} |\n|{' --- |' * len(HEADER)}")
    for case in cases:
        print(line(row(case, times, machine)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
