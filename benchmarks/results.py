# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Results: the machine, Markdown tables, and one file for each date and machine."""

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_async.files import write_atomically
from megatron_async.training import provenance

_NOISE = re.compile(r"\(R\)|\(TM\)|\b(AMD|Intel|CPU|Processor)\b|@.*")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of every benchmark."""
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="result")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="add tables to FOLDER/DATE_MACHINE.md")


def machine() -> dict[str, Any]:
    """What a result depends on: processor, cores, versions, command, commit, date, and the load before it."""
    return provenance.machine() | {
        "load_average": round(os.getloadavg()[0], 2),
        "versions": provenance.versions(),
        "command": shlex.join([f"tools/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "commit": _commit(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }


def _commit() -> str:
    """The commit, marked where files differ from it; "unknown" outside a git checkout."""
    folder, command = Path(__file__).parent, ["git", "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


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
