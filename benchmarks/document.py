# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Result files as tables and a picture, and tables between markers of a document."""

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.contenders import OURS
from megatron_async.files import write_atomically

_TALLEST = 2.1
"""Top of the picture, in times of the limit: about 1F1B with as many micro-batches as stages."""


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


def of_kind(result: Mapping[str, Any], compute: str) -> dict[str, Any]:
    """The part of a schedule benchmark with "real" or with "emulated" compute."""
    return {
        "machine": result["machine"],
        "rows": [row for row in result["rows"] if row["compute"] == compute],
        "absent": [item for item in result["absent"] if item["setting"].startswith(compute)],
    }


def _side_by_side(rows: Sequence[Mapping[str, Any]]) -> str:
    """Contenders down, micro-batches across."""
    counts = sorted({row["microbatches"] for row in rows})
    found = {(row["contender"], row["microbatches"]): row for row in rows}
    lines = []
    for name in _contenders(rows):
        cells = [found.get((name, count)) for count in counts]
        lines.append([f"**{name}**" if name in OURS else name, *(_cell(cell) for cell in cells)])
    return table(["contender", *(f"M = {count}" for count in counts)], lines)


def _contenders(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names in the order in which they were measured, ours behind the others."""
    names = dict.fromkeys(row["contender"] for row in rows)
    return [*(name for name in names if name not in OURS), *(name for name in OURS if name in names)]


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    doubtful = "~" if row["uneven"] else ""
    return f"{row['ms_median']:.0f} ± {row['ms_spread']:.0f}, {doubtful}{row['ratio_to_limit']:.2f}"


def figure(result: Mapping[str, Any]) -> Figure:
    """Ratio to the limit of every contender, one panel for each number of stages with balanced ranks."""
    rows = [row for row in result["rows"] if row["setting"] in ("real", "emulated") and row["contender"] != "limit"]
    panels = list(dict.fromkeys((row["stages"], row["setting"]) for row in rows))
    drawing = Figure(figsize=(2.6 * max(1, len(panels)) + 1.6, 3.6), layout="constrained")
    FigureCanvasAgg(drawing)
    axes = drawing.subplots(1, max(1, len(panels)), sharey=True, squeeze=False)[0]
    for axis, (stages, setting) in zip(axes, panels, strict=False):
        peers = cycle(colormaps["Set2"].colors)  # type: ignore[attr-defined]
        own = cycle(("black", "tab:red", "tab:blue", "tab:purple"))
        for name in _contenders(rows):
            line = sorted(
                (row["microbatches"], row["ratio_to_limit"])
                for row in rows
                if (row["stages"], row["setting"], row["contender"]) == (stages, setting, name)
            )
            ours = name in OURS
            axis.plot(
                [count for count, _ in line],
                [ratio for _, ratio in line],
                label=name,
                color=next(own if ours else peers),
                linewidth=1.8 if ours else 1.2,
                marker="o" if ours else ".",
                markersize=4,
            )
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted({row["microbatches"] for row in rows if row["stages"] == stages}))
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.set_ylim(0.95, _TALLEST)
        axis.set_title(f"{stages} stages, {setting}")
        axis.set_xlabel("micro-batches per batch")
        axis.minorticks_off()
        axis.axhline(1.0, color="#888888", linewidth=0.8)
    axes[0].set_ylabel("time per batch / compute alone")
    drawing.legend(*axes[0].get_legend_handles_labels(), fontsize=7, loc="outside right center")
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


def training(result: Mapping[str, Any]) -> dict[str, str]:
    """The tables of a benchmark of whole runs, by part."""
    writers: dict[str, Callable[[Any], str]] = {
        "whole": _whole,
        "features": _features,
        "memory": _memory,
        "steady": _steady,
        "saves": _saves,
    }
    return {part: write(result[part]) for part, write in writers.items() if part in result}


def _whole(rows: Sequence[Mapping[str, Any]]) -> str:
    parts = []
    for row in rows:
        stages = [[stage[part] for part in ("forward", "backward", "update")] for stage in row["stages_ms"]]
        balance = " and ".join(" + ".join(f"{time:.0f}" for time in stage) for stage in stages)
        parts.append(
            f"**{row['model']}, M = {row['microbatches']}**: 2bw is {row['speedup']:.2f} times as fast as Megatron's "
            f"1f1b ({row['speedup'] / row['bound']:.0%} of the {row['bound']:.2f} possible with these stages), and "
            f"takes {row['ratio_to_limit']:.2f} times as long as compute alone (forward, backward of a micro-batch and "
            f"update of each stage alone: {balance} ms).\n"
        )
        parts.append(_timings(row["ms"]))
    return "\n".join(parts)


def _timings(milliseconds: Mapping[str, Mapping[str, float]]) -> str:
    lines = [
        [name, f"{timing['median']:.1f}", f"{timing['spread']:.1f}", f"{timing['batches']}"]
        for name, timing in milliseconds.items()
    ]
    return table(["run", "ms per batch", "distance of quartiles", "batches"], lines)


def _features(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """A table for each model: one row for each run, one column for the batch and each of its parts."""
    parts = []
    for model, milliseconds in found.items():
        lines = [[name, *(f"{value:.1f}" for value in times.values())] for name, times in milliseconds.items()]
        parts.append(f"**Where the time goes**, {model}, 2bw, M = 2: ms per batch on the slower rank, medians\n")
        parts.append(table(["run", *next(iter(milliseconds.values()))], lines))
    return "\n".join(parts)


def _memory(items: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for item in items:
        added = ", ".join(f"{name} {size / 1e6:+.2f}" for name, size in item["parts"].items() if size)
        off = item["measured"] / item["predicted"] - 1
        numbers = [f"{item['predicted'] / 1e6:.2f}", f"{item['measured'] / 1e6:.2f}", f"{off:+.1%}"]
        lines.append([item["schedule"], f"{item['stage']}", *numbers, added or "-"])
    title = "**Peak memory**, 2 stages, M = 4, MB by 10^6 bytes, counted by the allocator\n"
    return f"{title}\n{table(['schedule', 'stage', 'predicted', 'measured', 'off', 'on top of 1F1B'], lines)}"


def _steady(ranks: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    lines = [
        [
            f"{rank}",
            f"{state['batch']}",
            f"{state['tensors']}",
            f"{state['tensor_bytes'] / 1e6:.3f}",
            f"{state['python_bytes'] / 1e6:.3f}",
            f"{state['handles']}",
            f"{state['ms_median']:.1f}",
        ]
        for rank, states in enumerate(ranks)
        for state in states
    ]
    title = f"**Over {ranks[0][-1]['batch']} batches**, 2bw with error feedback and Muon\n"
    head = ["stage", "batch", "tensors", "their MB", "Python's MB", "open handles", "ms per batch"]
    return f"{title}\n{table(head, lines)}"


def _saves(found: Mapping[str, Any]) -> str:
    lines = []
    for name, cost in found["costs"].items():
        batch = cost["batch_ms"]
        cells = [f"{cost[key]:.0f} ms, {cost[key] / batch:.2f} batches" for key in ("stop_ms", "longer_ms")]
        lines.append([name, f"{batch:.0f}", *cells])
    files, tensors = found["size"]["files"], found["size"]["tensors"]
    return (
        "**Cost of a checkpoint**, 2bw with error feedback and Adam, M = 4\n\n"
        + table(["run", "ms per batch without", "stop of the pipeline", "the run takes longer"], lines)
        + f"\nA checkpoint has {files / 1e6:.2f} MB, {files / tensors:.3f} times the bytes of its tensors.\n"
    )
