# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Result files as tables and a picture, and tables between markers of a document."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron_async.training.report import write_atomically

_OURS = ("2bw", "wpipe", "pipedream")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are aligned to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def provenance(machine: Mapping[str, Any], command: str) -> str:
    """One paragraph: where, when and with what a table was measured."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"Measured on {machine['date']} with `{command}`, commit {machine['commit']}: {machine['processor']}, "
        f"{machine['usable_cores']} cores, load average {machine['load_average']} before the start; {versions}.\n"
    )


def schedules(result: Mapping[str, Any]) -> str:
    """The tables of a schedule benchmark: one for each number of stages and setting."""
    parts = [provenance(result["machine"], result["machine"].get("command", "tools/benchmark_schedules.py"))]
    for stages, setting in dict.fromkeys((row["stages"], row["setting"]) for row in result["rows"]):
        rows = [row for row in result["rows"] if (row["stages"], row["setting"]) == (stages, setting)]
        parts.append(f"**{stages} stages, {setting}** (ms per batch, distance of quartiles, ratio to the limit)\n")
        parts.append(_side_by_side(rows))
    if result["absent"]:
        reasons: dict[tuple[str, str], list[str]] = {}
        for item in result["absent"]:
            place = f"P={item['stages']} M={item['microbatches']} {item['setting']}"
            reasons.setdefault((item["contender"], item["reason"]), []).append(place)
        parts.append("Without a row:\n")
        parts.append(
            "\n".join(f"- {name}: {reason} ({'; '.join(places)})" for (name, reason), places in reasons.items()) + "\n"
        )
    return "\n".join(parts)


def _side_by_side(rows: Sequence[Mapping[str, Any]]) -> str:
    """Contenders down, micro-batches across."""
    counts = sorted({row["microbatches"] for row in rows})
    found = {(row["contender"], row["microbatches"]): row for row in rows}
    lines = []
    for name in dict.fromkeys(row["contender"] for row in rows):
        cells = [found.get((name, count)) for count in counts]
        lines.append([f"**{name}**" if name in _OURS else name, *(_cell(cell) for cell in cells)])
    return table(["contender", *(f"M = {count}" for count in counts)], lines)


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    return f"{row['ms_median']:.0f} ± {row['ms_spread']:.0f}, {row['ratio_to_limit']:.2f}"


def figure(result: Mapping[str, Any]) -> Figure:
    """Ratio to the limit of every contender, one panel for each number of stages with balanced ranks."""
    rows = [row for row in result["rows"] if row["setting"] in ("real", "emulated") and row["contender"] != "limit"]
    panels = list(dict.fromkeys((row["stages"], row["setting"]) for row in rows))
    drawing = Figure(figsize=(4.2 * max(1, len(panels)), 3.6), layout="constrained")
    FigureCanvasAgg(drawing)
    axes = drawing.subplots(1, max(1, len(panels)), sharey=True, squeeze=False)[0]
    for axis, (stages, setting) in zip(axes, panels, strict=False):
        for name in dict.fromkeys(row["contender"] for row in rows):
            line = sorted(
                (row["microbatches"], row["ratio_to_limit"])
                for row in rows
                if (row["stages"], row["setting"], row["contender"]) == (stages, setting, name)
            )
            style = {"linewidth": 2.2, "marker": "o"} if name in _OURS else {"linewidth": 1.0, "marker": "."}
            axis.plot([count for count, _ in line], [ratio for _, ratio in line], label=name, **style)
        axis.set_xscale("log", base=2)
        axis.set_title(f"{stages} stages, {setting}")
        axis.set_xlabel("micro-batches per batch")
        axis.axhline(1.0, color="#888888", linewidth=0.8)
    axes[0].set_ylabel("time per batch / compute alone")
    axes[-1].legend(fontsize=7)
    return drawing


def replace_section(path: Path, name: str, text: str) -> None:
    """Put `text` between the markers of section `name` of a Markdown file, atomically.

    Raises:
        ValueError: the file has no such markers.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    document = path.read_text(encoding="utf-8")
    if document.count(begin) != 1 or document.count(end) != 1:
        raise ValueError(f"{path}: needs one line '{begin}' and one line '{end}' behind it")
    before, _, rest = document.partition(begin)
    _, _, after = rest.partition(end)
    write_atomically(path, f"{before}{begin}\n{text.rstrip()}\n{end}{after}")
