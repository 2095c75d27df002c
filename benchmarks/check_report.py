# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The report of tools/check_gpu.py: sections that run one after another, each with figures that must not be missing."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_async.files import write_atomically

Status = Literal["ok", "failed", "not run"]


@dataclass(slots=True)
class Result:
    """What a section found.

    Attributes:
        figures: plain data by name.
        text: in Markdown.
        problems: a sentence for each; none if all is well.
        skipped: why the section did not run here, or "".
    """

    figures: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    problems: list[str] = field(default_factory=list)
    skipped: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """One part of the check.

    Attributes:
        figures: names that the result must have, unless it was skipped; none of their values may be None or empty.
    """

    title: str
    run: Callable[[], Result]
    figures: Sequence[str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A section that has been run."""

    title: str
    status: Status
    seconds: float
    result: Result


def perform(sections: Sequence[Section]) -> Iterator[Outcome]:
    """Run the sections; an error of one is its problem and does not keep the others from running."""
    for section in sections:
        start = time.monotonic()
        try:
            result = section.run()
        except Exception as error:
            result = Result(problems=[f"{type(error).__name__}: {error}"])
        if not result.skipped:
            result.problems += [
                f"the figure {name!r} is missing" for name in section.figures if _is_missing(result.figures.get(name))
            ]
        status: Status = "failed" if result.problems else "not run" if result.skipped else "ok"
        yield Outcome(section.title, status, time.monotonic() - start, result)


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, Mapping | Sequence) and not value)


def write(folder: Path, form: str, machine: Mapping[str, Any], outcomes: Sequence[Outcome]) -> Path:
    """Write report.md and report.json; return the former.

    Args:
        form: one sentence: on which GPUs, or that all of it was emulated.
    """
    document = {"form": form, "machine": dict(machine), "sections": [asdict(outcome) for outcome in outcomes]}
    write_atomically(folder / "report.json", json.dumps(document, indent=1) + "\n")
    path = folder / "report.md"
    write_atomically(path, "\n".join(_lines(form, machine, outcomes)) + "\n")
    return path


def _lines(form: str, machine: Mapping[str, Any], outcomes: Sequence[Outcome]) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    yield "# check-gpu\n"
    yield f"{form}\n"
    yield f"{machine['date']}, commit {machine['commit']}; {machine['processor']}, {machine['usable_cores']} cores, "
    yield f"load average {machine['load_average']} before the start; {versions}.\n"
    yield "| section | status | seconds |\n| --- | --- | ---: |"
    yield from (f"| {outcome.title} | {outcome.status} | {outcome.seconds:.0f} |" for outcome in outcomes)
    for outcome in outcomes:
        yield f"\n## {outcome.title}: {outcome.status}\n"
        if outcome.result.skipped:
            yield outcome.result.skipped
        yield from (f"- **{problem}**" for problem in outcome.result.problems)
        if outcome.result.text:
            yield "\n" + outcome.result.text.rstrip()
