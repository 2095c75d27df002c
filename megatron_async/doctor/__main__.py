# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Check this machine; under torchrun, every host of the job.

    megatron-async doctor [--json]
    torchrun --nnodes N ... -m megatron_async.doctor

Exit status 0, or 1 where something is marked FAIL.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_async.doctor import devices, host, job, packages
from megatron_async.doctor.finding import Finding
from megatron_async.launcher import is_first_rank
from megatron_async.platform.job import world_size

_STYLES = {"OK": "green", "WARN": "yellow", "FAIL": "bold red"}


def examine() -> list[job.Host]:
    """All hosts with their findings."""
    in_job, gpus = world_size() > 1, torch.cuda.device_count() if torch.cuda.is_available() else 0
    own = [*packages.findings(gpus), *devices.findings(gpus), *host.findings(gpus, in_job)]
    return job.gather(own) if in_job else [job.Host("this machine", tuple(own))]


def main(argv: Sequence[str]) -> int:
    """Exit status: 0, or 1 where something is marked FAIL."""
    parser = argparse.ArgumentParser(
        prog="megatron-async doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    options = parser.parse_args(argv)
    hosts = examine()
    together = tuple(job.findings(hosts)) if world_size() > 1 else ()
    sections = {found.name: found.findings for found in hosts} | ({"the job": together} if together else {})
    if is_first_rank():
        _print(sections, as_json=options.json)
    return 1 if any(finding.level == "FAIL" for findings in sections.values() for finding in findings) else 0


def _print(sections: dict[str, tuple[Finding, ...]], *, as_json: bool) -> None:
    if as_json:
        document: dict[str, Any] = {name: [asdict(finding) for finding in found] for name, found in sections.items()}
        sys.stdout.write(json.dumps(document, indent=1) + "\n")
        return
    console = Console(width=None if sys.stdout.isatty() else 150)
    for name, findings in sections.items():
        table = Table("check", "", "found", "what to change", title=name, title_justify="left")
        for finding in findings:
            level = f"[{_STYLES[finding.level]}]{finding.level}[/]"
            table.add_row(finding.check, level, escape(finding.found), escape(finding.change))
        console.print(table)
    count = {level: sum(f.level == level for found in sections.values() for f in found) for level in _STYLES}
    console.print(", ".join(f"{number} {level}" for level, number in count.items()), highlight=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
