# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Rows of `schedules` as Markdown tables and as a picture."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure

from benchmarks.contenders import LIMIT, OURS
from benchmarks.results import table

_TALLEST = 2.1
"""Top of the picture: about 1F1B with as many micro-batches as stages."""

Row = Mapping[str, Any]


def tables(rows: Sequence[Row], absent: Sequence[Row]) -> str:
    """A table for each number of stages and setting: contenders down, micro-batches across."""
    parts = []
    for stages, setting in dict.fromkeys((row["stages"], row["setting"]) for row in rows):
        part = {(row["contender"], row["microbatches"]): row for row in _of(rows, stages, setting)}
        counts = sorted({count for _, count in part})
        lines = [
            [f"**{name}**" if name in OURS else name, *(_text(part.get((name, count))) for count in counts)]
            for name in _ordered(part.values())
        ]
        parts.append(f"**{stages} stages, {setting}** (ms per batch, ratio to the limit, ± distance of quartiles)\n")
        parts.append(table(["contender", *(f"M = {count}" for count in counts)], lines))
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in absent:
        place = f"P={row['stages']} M={row['microbatches']} {row['setting']}"
        reasons.setdefault((row["contender"], row["reason"]), []).append(place)
    if reasons:
        listed = [f"- {name}: {reason} ({'; '.join(places)})\n" for (name, reason), places in reasons.items()]
        parts += ["Without a row:\n", "".join(listed)]
    return "\n".join(parts)


def _of(rows: Iterable[Row], stages: int, setting: str) -> list[Row]:
    return [row for row in rows if (row["stages"], row["setting"]) == (stages, setting)]


def _ordered(rows: Iterable[Row]) -> list[str]:
    """Contenders in the order of measurement, ours last."""
    names = dict.fromkeys(row["contender"] for row in rows)
    return [*(name for name in names if name not in OURS), *(name for name in OURS if name in names)]


def _text(row: Row | None) -> str:
    if row is None:
        return "-"
    return f"{row['ms_median']:.0f} ± {row['ms_spread']:.0f}, {row['ratio_to_limit']:.2f} ± {row['ratio_spread']:.2f}"


def figure(rows: Sequence[Row]) -> Figure:
    """Ratio to the limit of every contender, one panel for each number of stages with balanced ranks."""
    rows = [row for row in rows if row["setting"] == row["compute"] and row["contender"] != LIMIT]
    panels = list(dict.fromkeys((row["stages"], row["setting"]) for row in rows)) or [(0, "nothing measured")]
    drawing = Figure(figsize=(2.6 * len(panels) + 1.6, 3.6), layout="constrained")
    axes = drawing.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (stages, setting) in zip(axes, panels, strict=True):
        others = cycle(colormaps["Set2"].colors)  # type: ignore[attr-defined]
        ours = cycle(("black", "tab:red", "tab:blue", "tab:purple"))
        part = _of(rows, stages, setting)
        for name in _ordered(rows):
            line = sorted((row["microbatches"], row["ratio_to_limit"]) for row in part if row["contender"] == name)
            style = {"color": next(ours), "lw": 1.8} if name in OURS else {"color": next(others), "lw": 1.2}
            axis.plot(*zip(*line, strict=True) if line else ([], []), ".-", label=name, **style)
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted({row["microbatches"] for row in part}))
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.set(ylim=(0.95, _TALLEST), title=f"{stages} stages, {setting}", xlabel="micro-batches per batch")
        axis.minorticks_off()
        axis.axhline(1.0, color="#888888", linewidth=0.8)
    axes[0].set_ylabel("time per batch / compute alone")
    drawing.legend(*axes[0].get_legend_handles_labels(), fontsize=7, loc="outside right center")
    return drawing
