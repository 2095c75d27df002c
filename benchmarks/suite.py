# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Which cells are measured, and what their outcomes add up to."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.contenders import LIMIT, OURS
from benchmarks.processes import JobFailed, Pool
from benchmarks.stack import Cell, Pace, emulated_cell
from benchmarks.turns import Turns, ratio

CONTENDERS: Sequence[str] = (
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

PACE = Pace(forward_ms=40.0, backward_ms=80.0)
"""Emulated times, unless others are asked for: of the order of a stage of a large model on a GPU. Each micro-batch
costs a rank some 2 to 4 ms beside them here, since all ranks share a few cores."""

_CROWDED = 16
"""From so many ranks on, emulated times are half as long again: eight on a core get into each other's way."""

_TOLERANCE = 1e-3
"""Largest relative distance of trained weights: fp32, another order of sums, through three updates."""

_START_UP_S = 120.0
_SLOWEST = 6.0
"""So many times its limit a cell may take before it counts as hung."""


@dataclass(frozen=True, slots=True)
class Effort:
    """Rounds of each cell, and batches of each contender in a round that count."""

    rounds: int
    batches: int


@dataclass(frozen=True, slots=True)
class Row:
    """One contender in one cell; times in ms per batch of M micro-batches.

    Attributes:
        setting: "real", or what is emulated.
        compute: "real" or "emulated".
        ms_median, ms_spread: on the slowest rank; the spread is the distance between the quartiles.
        ratio_to_limit: to compute alone beside each turn, see `turns.ratio`.
        uneven: how many turns lie between turns of the limit that differ, see `turns.between_limits`.
        batches: how many were timed on a rank.
        distance: of the trained weights from the one-process reference, relative to the way they have come.
        checked: whether that is small enough.
    """

    contender: str
    stages: int
    microbatches: int
    compute: str
    setting: str
    ms_median: float
    ms_spread: float
    ratio_to_limit: float
    uneven: int
    batches: int
    distance: float
    checked: bool


@dataclass(frozen=True, slots=True)
class Absent:
    """A contender without a row, and why."""

    contender: str
    stages: int
    microbatches: int
    setting: str
    reason: str


def cells(extent: str, pace: Pace = PACE) -> list[tuple[Cell, Effort]]:
    """The cells to measure: "quick" in a few minutes, "default" in about twenty, "full" in more than an hour."""
    if extent == "quick":
        return [
            (Cell(2, 4), Effort(1, 2)),
            (emulated_cell(2, 4, pace), Effort(1, 2)),
            (emulated_cell(4, 4, pace), Effort(1, 2)),
        ]
    full = extent == "full"

    def emulated(stages: int, factor: int, **changes: Any) -> Cell:
        slower = 1.5 if stages >= _CROWDED else 1.0
        times = replace(pace, forward_ms=slower * pace.forward_ms, backward_ms=slower * pace.backward_ms)
        return emulated_cell(stages, factor * stages, replace(times, **changes))

    real = [
        (Cell(2, microbatches), Effort(rounds, batches))
        for microbatches, rounds, batches in ((2, 5, 1), (4, 2, 1), (8, 2, 1), (16, 2, 1))
        if full or microbatches < 16
    ]
    balanced = [
        (emulated(stages, factor), Effort(1, 2))
        for stages in (2, 4, 8, 16)
        for factor in (1, 2, 4)
        if full or factor == 1 or (factor == 2 and stages <= 4)
    ]
    uneven = [
        (emulated(stages, factor, slow_rank=stages // 2), Effort(1, 2))
        for stages in ((2, 4, 8, 16) if full else (4,))
        for factor in ((1, 2, 4) if full else (2,))
    ]
    links = [
        (emulated(4, 2, transfer_ms=share * pace.forward_ms), Effort(1, 2))
        for share in ((0.1, 0.25) if full else (0.1,))
    ]
    return real + balanced + uneven + links


def measure(
    settings: Sequence[tuple[Cell, Effort]],
    names: Sequence[str],
    report: Callable[[str], None],
    patience_s: float = 0.0,
) -> tuple[list[Row], list[Absent]]:
    """Measure cell after cell.

    Args:
        settings: cells and how long to measure them.
        names: contenders; the limit is always among them.
        report: takes a line of progress.
        patience_s: for each cell with real compute, see `turns.between_limits`.
    """
    rows: list[Row] = []
    absent: list[Absent] = []
    for cell, effort in settings:
        start = time.monotonic()
        found, missing = measure_cell(cell, effort, names, patience_s)
        rows += found
        absent += missing
        report(
            f"P={cell.stages} M={cell.microbatches} {cell.label}: {len(found)} contenders in "
            f"{time.monotonic() - start:.0f} s"
        )
    return rows, absent


def measure_cell(
    cell: Cell, effort: Effort, names: Sequence[str], patience_s: float = 0.0
) -> tuple[list[Row], list[Absent]]:
    """All contenders of a cell; where the ranks fail together, each of them alone, to name the one at fault."""
    try:
        return _measure_together(cell, effort, names, patience_s)
    except JobFailed:
        rows: list[Row] = []
        absent: list[Absent] = []
        for name in names:
            if name == LIMIT:
                continue
            try:
                found, missing = _measure_together(cell, effort, [LIMIT, name], patience_s)
            except JobFailed as failure:
                reason = str(failure).strip().splitlines()[-1]
                missing, found = [Absent(name, cell.stages, cell.microbatches, cell.label, reason)], []
            rows += found if not rows else [row for row in found if row.contender != LIMIT]
            absent += missing
        return rows, absent


def _measure_together(
    cell: Cell, effort: Effort, names: Sequence[str], patience_s: float
) -> tuple[list[Row], list[Absent]]:
    job = ("benchmarks.cell:run", cell, names, effort.rounds, effort.batches, patience_s)
    with Pool(pinned=True) as pool:
        ranks = pool.run(*job, ranks=cell.stages, timeout=patience_s + _timeout(cell, effort, len(names)))
    absent = [
        Absent(name, cell.stages, cell.microbatches, cell.label, reason) for name, reason in ranks[0].refused.items()
    ]
    rows = []
    for name in ranks[0].turns.own:
        distance = max(rank.distances[name] for rank in ranks)
        row = _row(cell, name, [rank.turns for rank in ranks], distance)
        if row.checked:
            rows.append(row)
        else:
            reason = f"wrong: trained weights are {distance:.1e} off, allowed {_TOLERANCE:.0e}"
            absent.append(Absent(name, cell.stages, cell.microbatches, cell.label, reason))
    return rows, absent


def _row(cell: Cell, name: str, ranks: Sequence[Turns], distance: float) -> Row:
    slowest = max(([batch for turn in rank.own[name] for batch in turn] for rank in ranks), key=statistics.median)
    lower, median, upper = statistics.quantiles(slowest, n=4, method="inclusive")
    return Row(
        contender=name,
        stages=cell.stages,
        microbatches=cell.microbatches,
        compute="real" if cell.pace is None else "emulated",
        setting=cell.label,
        ms_median=median,
        ms_spread=upper - lower,
        ratio_to_limit=ratio([rank.own[name] for rank in ranks], [rank.limits[name] for rank in ranks]),
        uneven=ranks[0].uneven[name],
        batches=len(slowest),
        distance=distance,
        checked=distance <= _TOLERANCE,
    )


def _timeout(cell: Cell, effort: Effort, contenders: int) -> float:
    per_microbatch = 0.1 if cell.pace is None else (cell.pace.forward_ms + cell.pace.backward_ms) / 1e3
    batches = 3 + effort.rounds * (effort.batches + 2)
    slots = cell.microbatches + cell.stages
    # The reference run of every contender is one process's work, on every rank at once.
    check = 3 * cell.microbatches * cell.stages * (0.2 if cell.pace is None else 0.005) * cell.stages
    return _START_UP_S + _SLOWEST * contenders * (batches * slots * per_microbatch + check)


def as_json(rows: Sequence[Row], absent: Sequence[Absent], machine: dict[str, Any]) -> dict[str, Any]:
    """The result file."""
    return {"machine": machine, "rows": [asdict(row) for row in rows], "absent": [asdict(item) for item in absent]}
