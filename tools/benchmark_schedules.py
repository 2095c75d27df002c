# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Measure pipeline schedules side by side: torch.distributed.pipelining, Megatron-Core and this package.

Same layers, weights, micro-batches and optimizer under every contender; each one's trained weights are compared with
a one-process run first, and only contenders that agree get a row. See docs/measurements.md.

python tools/benchmark_schedules.py --json runs/benchmarks/schedules.json
"""

import argparse
import json
import math
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/ is not installed
os.environ.setdefault("OMP_NUM_THREADS", "1")

from megatron_async import platform


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="result")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="tables")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="picture, by its suffix PNG or SVG")
    parser.add_argument(
        "--update",
        type=Path,
        metavar="FILE",
        help="document whose sections 'schedules-real' and 'schedules-emulated' are replaced",
    )
    parser.add_argument(
        "--cells",
        choices=("quick", "default", "full"),
        default="default",
        help="how many: a few minutes, about twenty minutes or an hour and a half on two cores",
    )
    parser.add_argument(
        "--emulate-compute-ms",
        metavar="F,B",
        default="40,80",
        help="emulated times of a rank, half as long again with 16 stages (default: %(default)s)",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=0.5,
        metavar="MINUTES",
        help="with real compute, how long each cell may repeat turns during which other work slowed the machine "
        "(default: %(default)g); a turn that counts all the same is marked ~",
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="turns of each contender (default: by the cell)")
    parser.add_argument("--contenders", nargs="+", metavar="NAME", help="only these (default: all)")
    parser.add_argument("--stages", type=int, nargs="+", metavar="P", help="only cells with these numbers of stages")
    parser.add_argument("--microbatches", type=int, nargs="+", metavar="M", help="only cells with these batches")
    parser.add_argument("--compute", choices=("real", "emulated"), help="only cells of this kind")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, 2 for wrong arguments, 1 where one of this package's schedules has no row where it should."""
    options = parse(arguments)
    platform.activate("cpu")
    from benchmarks import document, machine, suite
    from benchmarks.contenders import LIMIT
    from benchmarks.stack import Pace
    from megatron_async.files import write_atomically
    from megatron_async.schedules import schedule_problems
    from megatron_async.training.emulation import EmulatedCompute
    from megatron_async.training.report import save_figure

    try:
        emulated = EmulatedCompute.parse(options.emulate_compute_ms)
    except ValueError as error:
        sys.stderr.write(f"--emulate-compute-ms {error}\n")
        return 2
    pace = Pace(emulated.forward_ms, emulated.backward_ms)
    problems = []
    if not 0 <= options.patience < math.inf:
        problems.append(f"--patience {options.patience:g}: give minutes from 0")
    if options.rounds is not None and options.rounds < 1:
        problems.append(f"--rounds {options.rounds}: give at least 1")
    if problems:
        sys.stderr.write("\n".join(problems) + "\n")
        return 2
    unknown = sorted(set(options.contenders or ()) - set(suite.CONTENDERS))
    if unknown:
        sys.stderr.write(f"no such contender: {', '.join(unknown)}. Known: {', '.join(suite.CONTENDERS)}.\n")
        return 2
    wanted = [name for name in suite.CONTENDERS if name in {LIMIT, *(options.contenders or suite.CONTENDERS)}]
    cells = [
        (cell, effort)
        for cell, effort in suite.cells(options.cells, pace)
        if (not options.stages or cell.stages in options.stages)
        and (not options.microbatches or cell.microbatches in options.microbatches)
        and (options.compute is None or (cell.pace is None) == (options.compute == "real"))
    ]
    if options.rounds:
        cells = [(cell, replace(effort, rounds=options.rounds)) for cell, effort in cells]
    if not cells:
        sys.stderr.write("no cell of the set has these stages, micro-batches and compute\n")
        return 2
    used = machine.describe()
    used["command"] = "tools/benchmark_schedules.py " + shlex.join(arguments if arguments is not None else sys.argv[1:])
    rows, absent = suite.measure(cells, wanted, lambda line: print(line, flush=True), patience_s=60 * options.patience)
    result = suite.as_json(rows, absent, used)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(options.json, json.dumps(result, indent=1) + "\n")
    if options.markdown:
        write_atomically(options.markdown, document.schedules(result))
    if options.figure:
        save_figure(document.figure(result), options.figure)
    if options.update:
        for compute in dict.fromkeys(row["compute"] for row in result["rows"]):
            text = document.schedules(document.of_kind(result, compute))
            document.replace_section(options.update, f"schedules-{compute}", text)
    failed = [
        item
        for item in absent
        if item.contender in document.OURS
        and not schedule_problems(item.contender, stages=item.stages, microbatches=item.microbatches, batches=2)
    ]
    for item in failed:
        sys.stderr.write(f"{item.contender} P={item.stages} M={item.microbatches} {item.setting}: {item.reason}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
