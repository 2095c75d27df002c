# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Measure whole training runs on two CPU processes: Megatron's 1F1B, 2BW, compute alone, and the cost of each feature.

python tools/benchmark_training.py --json runs/benchmarks/training.json

See docs/measurements.md.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/ is not installed

from benchmarks import results, whole


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, 1 where `--check` fails, 2 for wrong arguments."""
    parser = results.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each run (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=6, help="timed batches of a turn (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="fail if 2BW misses a bar of benchmarks/whole.py")
    options = parser.parse_args(arguments)
    if min(options.rounds, options.batches) < 1:
        parser.error(f"--rounds {options.rounds}, --batches {options.batches}: give at least 1")
    used, folder = results.machine(), options.json.resolve().parent
    rows = whole.measure(options.rounds, options.batches, folder)
    results.publish(options, used, "Whole training runs", whole.tables(rows), {"whole": rows})
    missed = [problem for row in rows for problem in row["missed"]]
    sys.stderr.write("".join(f"{problem}\n" for problem in missed))
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
