# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Results: statistics of turns, the machine, Markdown tables, and one file for each date and machine."""

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_async.files import write_atomically
from megatron_async.training import provenance

_NOISE = re.compile(r"\(R\)|\(TM\)|\b(AMD|Intel|CPU|Processor)\b|@.*")
Turns = Sequence[Sequence[float]]
"""Milliseconds by turn and batch. A turn is a few batches of one contender."""


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The options of every benchmark."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="result")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="add tables to FOLDER/DATE_MACHINE.md")
    return parser


def publish(options: argparse.Namespace, used: Mapping[str, Any], title: str, text: str, content: Any) -> None:
    """Print the tables in `text`, write `content` and the machine to --json, and add the tables to --results."""
    write_atomically(options.json, json.dumps({"machine": used, **content}, indent=1) + "\n")
    sys.stdout.write(text)
    if options.results:
        write(options.results, used, title, text)


def machine() -> dict[str, Any]:
    """What a result depends on: processor, cores, versions, command, commit, date, and the load before it."""
    folder, describe = Path(__file__).parent, ["git", "describe", "--always", "--dirty"]
    try:
        commit = subprocess.run(describe, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or no checkout
        commit = "unknown"
    return provenance.machine() | {
        "load_average": round(os.getloadavg()[0], 2),
        "versions": provenance.versions(),
        "command": shlex.join([f"tools/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "commit": commit,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are aligned to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def write(folder: Path, used: Mapping[str, Any], title: str, text: str) -> Path:
    """Add a section to the file of a date and machine, such as 2026-11-28_2-core-epyc.md; return its path.

    Args:
        folder: of the result files.
        used: from `machine`; `device` names a GPU.
        title: of the section.
        text: tables in Markdown.
    """
    device = used.get("device") or f"{used['usable_cores']} core {_NOISE.sub('', used['processor'])}"
    path = folder / f"{used['date']}_{'-'.join(re.findall('[a-z0-9]+', device.lower()))}.md"
    before = path.read_text(encoding="utf-8") if path.exists() else f"# {path.stem.replace('_', ', ')}\n"
    versions = ", ".join(f"{name} {version}" for name, version in used["versions"].items())
    source = (
        f"`{used['command']}`, commit {used['commit']}: {used.get('device') or used['processor']}, "
        f"{used['usable_cores']} cores, load average {used['load_average']} before the start; {versions}."
    )
    write_atomically(path, f"{before}\n## {title}\n\n{source}\n\n{text}")
    return path


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Median, and distance between the quartiles; 0 for a single value."""
    if len(values) == 1:
        return values[0], 0.0
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return median, upper - lower


def slowest(ranks: Sequence[Turns]) -> tuple[float, float]:
    """Median and distance of the quartiles of all batches, on the slowest rank."""
    return max(spread([batch for turn in turns for batch in turn]) for turns in ranks)


def ratio(own: Sequence[Turns], other: Sequence[Turns]) -> tuple[float, float]:
    """Ratio of batch times: median over turns, and distance of the quartiles.

    Args:
        own, other: by rank. Turns of the same number follow each other in time, so a slow machine slows both.
    """

    def medians(ranks: Sequence[Turns]) -> list[float]:
        return [max(map(statistics.median, turns)) for turns in zip(*ranks, strict=True)]

    return spread([time / base for time, base in zip(medians(own), medians(other), strict=True)])
