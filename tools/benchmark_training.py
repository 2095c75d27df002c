# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Measure whole training runs on two CPU processes: Megatron's 1F1B, 2BW, compute alone, and the cost of each feature.

python tools/benchmark_training.py --json runs/benchmarks/training.json

See docs/measurements.md.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/ is not installed

from benchmarks import results, runs, whole
from megatron_async.files import write_atomically


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, 1 where `--check` fails, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    results.add_options(parser)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each run (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=6, help="timed batches of a turn (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="fail if 2BW misses a bar of benchmarks/whole.py")
    options = parser.parse_args(arguments)
    if min(options.rounds, options.batches) < 1:
        parser.error(f"--rounds {options.rounds}, --batches {options.batches}: give at least 1")
    used, effort = results.machine(), runs.Effort(options.rounds, options.batches, options.json.resolve().parent)
    rows = whole.measure(effort)
    write_atomically(options.json, json.dumps({"machine": used, "whole": rows}, indent=1) + "\n")
    text, missed = whole.tables(rows), [problem for row in rows for problem in row["missed"]]
    sys.stdout.write(text)
    if options.results:
        results.write(options.results, used, "Whole training runs", text)
    sys.stderr.write("".join(f"{problem}\n" for problem in missed))
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
