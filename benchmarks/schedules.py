# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Schedules side by side: the cells, and the rows that their outcomes give."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from benchmarks.contenders import LIMIT, OURS
from benchmarks.processes import JobFailed, Pool
from benchmarks.stack import Cell, Pace, emulated_cell
from benchmarks.turns import ratio, slowest

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


@dataclass(frozen=True, slots=True)
class Effort:
    """Rounds of each cell, and batches of each contender in a round that count."""

    rounds: int
    batches: int


def cells(extent: str, pace: Pace) -> list[tuple[Cell, Effort]]:
    """The cells to measure: "quick" in a few minutes, "default" in about twenty, "full" in more than an hour.

    Args:
        extent: one of EXTENTS.
        pace: emulated times of a rank.
    """
    if extent == "quick":
        quick = [Cell(2, 4), emulated_cell(2, 4, pace), emulated_cell(4, 4, pace)]
        return [(cell, Effort(1, 2)) for cell in quick]
    full = extent == "full"

    def emulated(stages: int, factor: int, **changes: Any) -> tuple[Cell, Effort]:
        slower = 1.5 if stages >= _CROWDED else 1.0
        times = replace(pace, forward_ms=slower * pace.forward_ms, backward_ms=slower * pace.backward_ms, **changes)
        return emulated_cell(stages, factor * stages, times), Effort(1, 2)

    grid = [(stages, factor) for stages in (2, 4, 8, 16) for factor in (1, 2, 4)]
    return [
        *((Cell(2, count), Effort(rounds, 1)) for count, rounds in ((2, 8), (4, 5), (8, 3))),
        *(emulated(*size) for size in grid if full or size[1] == 1 or size in ((2, 2), (4, 2))),
        *(emulated(*size, slow_rank=size[0] // 2) for size in (grid if full else [(4, 2)])),
        *(emulated(4, 2, transfer_ms=share * pace.forward_ms) for share in ((0.1, 0.25) if full else (0.1,))),
    ]


Rows = list[dict[str, Any]]


def measure(settings: Sequence[tuple[Cell, Effort]], names: Sequence[str]) -> tuple[Rows, Rows]:
    """Measure cell after cell, with a line of progress for each.

    Args:
        settings: cells and how long to measure them.
        names: contenders; the limit is the first.

    Returns:
        Rows of the contenders that were measured, and rows of the others with the reason.
    """
    rows: Rows = []
    absent: Rows = []
    for cell, effort in settings:
        start = time.monotonic()
        try:
            found, missing = _measure(cell, effort, names)
        except JobFailed as failure:
            reason = str(failure).strip().splitlines()[-1]
            found, missing = [], [_place(cell, name) | {"reason": reason} for name in names]
        rows += found
        absent += missing
        place, seconds = f"P={cell.stages} M={cell.microbatches} {cell.setting}", time.monotonic() - start
        print(f"{place}: {len(found)} contenders in {seconds:.0f} s", flush=True)
    return rows, absent


def _measure(cell: Cell, effort: Effort, names: Sequence[str]) -> tuple[Rows, Rows]:
    with Pool(pinned=True) as pool:
        job = ("benchmarks.cell:run", cell, names, effort.rounds, effort.batches)
        ranks = pool.run(*job, ranks=cell.stages, timeout=_timeout(cell, effort, len(names)))
    rows = [_row(cell, name, ranks) for name in ranks[0].turns]
    absent = [_place(cell, name) | {"reason": reason} for name, reason in ranks[0].refused.items()]
    for row in rows:
        if not row["checked"]:
            reason = f"wrong: trained weights are {row['distance']:.1e} off, allowed {TOLERANCE:.0e}"
            absent.append(_place(cell, row["contender"]) | {"reason": reason})
    return [row for row in rows if row["checked"]], absent


def _place(cell: Cell, name: str) -> dict[str, Any]:
    place = {"contender": name, "stages": cell.stages, "microbatches": cell.microbatches}
    return place | {"compute": cell.compute, "setting": cell.setting}


def _row(cell: Cell, name: str, ranks: Sequence["Outcome"]) -> dict[str, Any]:
    """One contender; spreads are distances of the quartiles, over batches and over turns."""
    own, limits = ([rank.turns[name][side] for rank in ranks] for side in (0, 1))
    distance = max(rank.distances[name] for rank in ranks)
    row = _place(cell, name) | {"batches": sum(map(len, own[0])), "distance": distance}
    row["ms_median"], row["ms_spread"] = slowest(own)
    row["ratio_to_limit"], row["ratio_spread"] = ratio(own, limits)
    return row | {"checked": distance <= TOLERANCE}


def _timeout(cell: Cell, effort: Effort, contenders: int) -> float:
    """Seconds after which a cell counts as hung: six times its expected duration, after two minutes to start."""
    microbatch_s = 0.1 if cell.pace is None else (cell.pace.forward_ms + cell.pace.backward_ms) / 1e3
    batches = 3 + 2 * effort.rounds * (effort.batches + 2)
    # Every rank computes the one-process reference of every contender, all at the same time.
    check_s = 3 * cell.microbatches * cell.stages**2 * (0.2 if cell.pace is None else 0.005)
    return 120 + 6 * contenders * (batches * (cell.microbatches + cell.stages) * microbatch_s + check_s)
