# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Measure pipeline schedules side by side: torch.distributed.pipelining, Megatron-Core and this package.

All train the same layers on the same data. Only schedules whose trained weights agree with a one-process run get a row.

python tools/benchmark_schedules.py --json runs/benchmarks/schedules.json

See docs/measurements.md.
"""

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/ is not installed

from benchmarks import results, schedule_tables, schedules
from benchmarks.stack import Pace
from megatron_async.report import save_figure
from megatron_async.schedules import SCHEDULES, schedule_problems


def _pace(text: str) -> Pace:
    try:
        forward, backward = (float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be two numbers F,B in milliseconds, such as 40,80") from None
    if not (0 < forward < math.inf and 0 < backward < math.inf):
        raise argparse.ArgumentTypeError(f"{text!r}: both times must be positive and finite")
    return Pace(forward, backward)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = results.make_parser(__doc__)
    parser.add_argument("--figure", type=Path, metavar="FILE", help="picture, PNG or SVG by its suffix")
    sizes = "a few minutes, about twenty minutes or an hour and a half on two cores"
    parser.add_argument("--cells", choices=schedules.EXTENTS, default="default", help=sizes)
    times = "emulated times of a rank, half as long again with 16 stages (default: %(default)s)"
    parser.add_argument("--emulate-compute-ms", type=_pace, metavar="F,B", default="40,80", help=times)
    parser.add_argument("--rounds", type=int, metavar="N", help="turns of each contender (default: by the cell)")
    parser.add_argument("--contenders", nargs="+", choices=schedules.CONTENDERS, metavar="NAME", help="only these")
    parser.add_argument("--stages", type=int, nargs="+", metavar="P", help="only cells with these numbers of stages")
    parser.add_argument("--microbatches", type=int, nargs="+", metavar="M", help="only cells with these batches")
    parser.add_argument("--compute", choices=("real", "emulated"), help="only cells of this kind")
    options = parser.parse_args(arguments)
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: give at least 1")
    options.settings = [
        replace(cell, rounds=options.rounds or cell.rounds)
        for cell in schedules.cells(options.cells, options.emulate_compute_ms)
        if cell.stages in (options.stages or [cell.stages])
        and cell.microbatches in (options.microbatches or [cell.microbatches])
        and cell.compute in (options.compute or cell.compute)
    ]
    if not options.settings:
        parser.error("no cell of the set has these stages, micro-batches and compute")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, 2 for wrong arguments, 1 where one of this package's schedules has no row where it should."""
    options = parse(arguments)
    wanted = {schedules.LIMIT, *(options.contenders or schedules.CONTENDERS)}
    names, used = [name for name in schedules.CONTENDERS if name in wanted], results.machine()
    rows, absent = schedules.measure(options.settings, names)
    text = schedule_tables.tables(rows, absent)
    results.publish(options, used, "Schedules", text, {"rows": rows, "absent": absent})
    if options.figure:
        save_figure(schedule_tables.figure(rows), options.figure)
    missed = False
    for row in absent:
        name, place = row["contender"], {"stages": row["stages"], "microbatches": row["microbatches"]}
        if name in SCHEDULES and not schedule_problems(name, **place, batches=2):  # it should run in this cell
            missed = True
            sys.stderr.write("{contender} P={stages} M={microbatches} {setting}: {reason}\n".format(**row))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
