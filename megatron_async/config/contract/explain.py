# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The contract in words: one option for `--explain`, all of them for docs/arguments.md."""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_async.checkpoint import on_resume
from megatron_async.config.contract.check import ROWS, rows_of
from megatron_async.config.contract.row import Status

_HEADS: dict[Status, str] = {"as in Megatron": "As in Megatron", "refused": "Refused", "inert here": "Inert here"}


def explain(words: Sequence[str]) -> tuple[str, bool]:
    """Status and reason of every option in `words`; whether all are known. Values of options are passed over."""
    parser: argparse.ArgumentParser | None = None
    lines, known = [], True
    for word in words or ["(none given)"]:
        if not word.startswith("--") and words:
            continue
        flag = word.partition("=")[0].lstrip("-")
        if not rows_of(flag):  # a second spelling, an option of this package, or none
            parser = parser or _parser()
            action = parser._option_string_actions.get(f"--{flag}")
            canonical = action.option_strings[0].lstrip("-") if action else flag
            if not rows_of(canonical):
                lines.append(f"--{flag}: {_own(action)}")
                known = known and action is not None
                continue
            flag = canonical
        lines += [f"--{flag}{f' {value}' if value else ''}: {row.sentence()}" for row, value in rows_of(flag)]
    return "\n".join(lines), known


def _own(action: Any) -> str:
    return f"an option of megatron_async. {action.help}" if action else "no such option, give --explain --OPTION ..."


def _parser() -> argparse.ArgumentParser:
    from megatron_async import platform

    platform.activate("cpu")
    from megatron_async.config.parser import make_parser

    return make_parser()


def markdown() -> str:
    """The tables of docs/arguments.md."""
    return "\n".join(_tables())


def _tables() -> Iterator[str]:
    for status, head in _HEADS.items():
        rows = [row for row in ROWS if row.status == status]
        last = {"as in Megatron": "Shown by", "refused": "Instead", "inert here": ""}[status]
        yield f"## {head}\n"
        yield f"| Options | Why | {last} |\n|---|---|---|"
        for row in rows:
            options = " ".join(f"`--{option.replace('=', ' ')}`" for option in row.options)
            when = f"{row.when[0].upper()}{row.when[1:]}: " if row.when else ""
            yield f"| {options} | {when}{row.reason} | {(row.shown_by and f'`{row.shown_by}`') or row.instead} |"
        yield ""
    yield "## On resume\n"
    yield "These are compared with the saved run's before anything is loaded. Every other option may change.\n"
    yield "| What depends on them | Options | May change with |\n|---|---|---|"
    for fixed in on_resume.TABLE:
        options = " ".join(dict.fromkeys(f"`{on_resume.option(name)}`" for name in fixed.names))
        yield f"| {fixed.what} | {options} | {' '.join(f'`{flag}`' for flag in fixed.unless.split())} |"
    yield ""
