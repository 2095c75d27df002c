# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Table 12 of arXiv 2606.30634 (F.2): time of a batch over compute, by the paper's model and by our own tables.

    python examples/paper/slowdown.py

The model is 1 + bubble / (M (F + B)) with P stages, M micro-batches, F, B, W the times of forward, backward and
weight-gradient backward, and a forward and a backward of DualPipe that overlap completely. The simulated rows run our
tables without the time of transfers. Nothing here is measured; docs/measurements.md has what was.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # examples/ is not installed

from megatron_async.schedules import StageCosts, make_schedule, simulate  # noqa: E402

STAGES, MICROBATCHES, WEIGHT = 16, (16, 32, 64), 1.0
BACKWARDS = {"B = 2 F": 2.0, "B = 3 F, recomputation": 3.0}


def modelled(schedule: str, microbatches: int, backward: float, stages: int = STAGES) -> float:
    """The paper's slowdown for F = W = 1."""
    both = 1 + backward
    bubble = {
        "2bw": 0.0,
        "1f1b": (stages - 1) * both,
        "zb1p": (stages - 1) * (both - 2 * WEIGHT),
        "dualpipe": (stages / 2 - 1) * (both + backward - 3 * WEIGHT),
    }[schedule]
    return 1 + bubble / (microbatches * both)


def simulated(schedule: str, microbatches: int, backward: float, stages: int = STAGES) -> float:
    """Time over compute of this package's table, between filling and draining."""
    plan = make_schedule(schedule, stages=stages, microbatches=microbatches, batches=12)
    return 1 / (1 - simulate(plan, StageCosts(1.0, backward)).steady_bubble_share)


def markdown() -> str:
    """The table."""
    lines = [
        f"| Backward | Schedule | {' | '.join(f'M = {count}' for count in MICROBATCHES)} |",
        f"|---|---|{'---:|' * len(MICROBATCHES)}",
    ]
    for name, backward in BACKWARDS.items():
        for kind, schedules, slowdown in (
            ("model", ("2bw", "1f1b", "zb1p", "dualpipe"), modelled),
            ("simulated", ("1f1b", "2bw", "wpipe"), simulated),
        ):
            for schedule in schedules:
                values = " | ".join(f"{slowdown(schedule, count, backward):.3f}" for count in MICROBATCHES)
                lines.append(f"| {name} | {schedule}, {kind} | {values} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    sys.stdout.write(markdown())


if __name__ == "__main__":
    main()
