# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Schedules side by side: the cells, and the rows that their outcomes give."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchmarks.contenders import LIMIT, OURS
from benchmarks.processes import JobFailed, Pool
from benchmarks.results import ratio, slowest
from benchmarks.stack import Cell, Pace, emulated_cell

if TYPE_CHECKING:  # needs Megatron, which only the ranks import
    from benchmarks.cell import Outcome

CONTENDERS = (
    LIMIT,
    "torch-gpipe",
    "torch-1f1b",
    "torch-interleaved-1f1b",
    "torch-interleaved-zero-bubble",
    "torch-zbv",
    "torch-dualpipev",
    "megatron-1f1b",
    "megatron-interleaved-1f1b",
    *OURS,
)
EXTENTS = ("quick", "default", "full")
TOLERANCE = 1e-3
"""Largest relative distance of trained weights: fp32, another order of sums, three updates."""

_CROWDED = 16
"""From so many ranks on, emulated times are half as long again: eight processes on a core disturb each other."""


def cells(extent: str, pace: Pace) -> list[Cell]:
    """The cells to measure: "quick" in a few minutes, "default" in about twenty, "full" in more than an hour.

    Args:
        extent: one of EXTENTS.
        pace: emulated times of a rank.
    """
    if extent == "quick":
        return [Cell(2, 4), emulated_cell(2, 4, pace), emulated_cell(4, 4, pace)]
    full = extent == "full"

    def emulated(stages: int, factor: int, **changes: Any) -> Cell:
        slower = 1.5 if stages >= _CROWDED else 1.0
        times = replace(pace, forward_ms=slower * pace.forward_ms, backward_ms=slower * pace.backward_ms, **changes)
        return emulated_cell(stages, factor * stages, times)

    grid = [(stages, factor) for stages in (2, 4, 8, 16) for factor in (1, 2, 4)]
    return [
        *(Cell(2, count, rounds=rounds, batches=1) for count, rounds in ((2, 8), (4, 5), (8, 3))),
        *(emulated(*size) for size in grid if full or size[1] == 1 or size in ((2, 2), (4, 2))),
        *(emulated(*size, slow_rank=size[0] // 2) for size in (grid if full else [(4, 2)])),
        *(emulated(4, 2, transfer_ms=share * pace.forward_ms) for share in ((0.1, 0.25) if full else (0.1,))),
    ]


Rows = list[dict[str, Any]]


def measure(settings: Sequence[Cell], names: Sequence[str]) -> tuple[Rows, Rows]:
    """Measure contenders in cell after cell, with a line of progress for each; the limit is the first contender.

    Returns:
        Rows of the contenders that were measured, and rows of the others with the reason.
    """
    rows: Rows = []
    absent: Rows = []
    for cell in settings:
        start, found = time.monotonic(), []
        try:
            with Pool(pinned=True) as pool:
                timeout = _timeout(cell, len(names))
                ranks = pool.run("benchmarks.cell:run", cell, names, ranks=cell.stages, timeout=timeout)
        except JobFailed as failure:
            reasons = dict.fromkeys(names, str(failure).strip().splitlines()[-1])
        else:
            found, reasons = [_row(cell, name, ranks) for name in ranks[0].turns], ranks[0].refused
        for row in found:
            if not row["checked"]:
                reason = f"wrong: trained weights are {row['distance']:.1e} off, allowed {TOLERANCE:.0e}"
                reasons[row["contender"]] = reason
        rows += [row for row in found if row["checked"]]
        absent += [_place(cell, name) | {"reason": reason} for name, reason in reasons.items()]
        place, seconds = f"P={cell.stages} M={cell.microbatches} {cell.setting}", time.monotonic() - start
        print(f"{place}: {len(found)} contenders in {seconds:.0f} s", flush=True)
    return rows, absent


def _place(cell: Cell, name: str) -> dict[str, Any]:
    place = {"contender": name, "stages": cell.stages, "microbatches": cell.microbatches}
    return place | {"compute": cell.compute, "setting": cell.setting}


def _row(cell: Cell, name: str, ranks: Sequence["Outcome"]) -> dict[str, Any]:
    """One contender; spreads are distances of the quartiles, over batches and over turns."""
    own, limits = ([rank.turns[name][side] for rank in ranks] for side in (0, 1))
    distance = max(rank.distances[name] for rank in ranks)
    row = _place(cell, name) | {"turns": len(own[0]), "distance": distance, "checked": distance <= TOLERANCE}
    row["ms_median"], row["ms_spread"] = slowest(own)
    row["ratio_to_limit"], row["ratio_spread"] = ratio(own, limits)
    return row


def _timeout(cell: Cell, contenders: int) -> float:
    """Seconds after which a cell counts as hung: six times its expected duration, after two minutes to start."""
    microbatch_s = 0.2 if cell.pace is None else (cell.pace.forward_ms + cell.pace.backward_ms) / 1e3
    slots = cell.microbatches + cell.stages
    # Each rank also trains the whole stack for the check.
    return 120 + 6 * contenders * slots * microbatch_s * (3 * cell.stages + 2 * cell.rounds * (cell.batches + 2))
