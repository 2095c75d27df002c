# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The contract in words: one option for `--explain`, all of them for docs/arguments.md."""

import argparse
from collections.abc import Iterator, Sequence
from functools import cache

from megatron_async.checkpoint import on_resume
from megatron_async.config.contract.check import ROWS, rows_of


def explain(words: Sequence[str]) -> tuple[str, bool]:
    """Status and reason of every option in `words`; whether all are known. Values of options are passed over."""
    lines, known = [], True
    for flag in [word.partition("=")[0].lstrip("-") for word in words if word.startswith("--")] or ["(none given)"]:
        action, rows = None, rows_of(flag)
        if not rows:  # a second spelling, an option of this package, or none
            action = _actions().get(f"--{flag}")
            known = known and action is not None
            flag = action.option_strings[0].lstrip("-") if action else flag
            rows = rows_of(flag)
        lines += [f"--{flag}{f' {value}' if value else ''}: {row.sentence()}" for row, value in rows]
        if not rows and action:
            lines.append(f"--{flag}: an option of megatron_async. {action.help}")
        elif not rows:
            lines.append(f"--{flag}: no such option, give --explain --OPTION ...")
    return "\n".join(lines), known


@cache
def _actions() -> dict[str, argparse.Action]:
    """Every flag of the parser -> its action. Takes seconds."""
    from megatron_async import platform

    platform.activate("cpu")
    from megatron_async.config.parser import make_parser

    return make_parser(texts=False)._option_string_actions


def markdown() -> str:
    """The tables of docs/arguments.md."""
    return "\n".join(_tables())


def _tables() -> Iterator[str]:
    for status, last in {"as in Megatron": "Shown by", "refused": "Instead", "inert here": ""}.items():
        yield f"## {_capital(status)}\n"
        yield f"| Options | Why | {last} |\n|---|---|---|"
        for row in (row for row in ROWS if row.status == status):
            options = " ".join(f"`--{option.replace('=', ' ')}`" for option in row.options)
            when = f"{_capital(row.when)}: " if row.when else ""
            yield f"| {options} | {when}{row.reason} | {(row.shown_by and f'`{row.shown_by}`') or row.instead} |"
        yield ""
    yield "## On resume\n"
    yield "These are compared with the saved run's before anything is loaded. Every other option may change.\n"
    yield "| What depends on them | Options | May change with |\n|---|---|---|"
    for fixed in on_resume.TABLE:
        options = " ".join(dict.fromkeys(f"`{on_resume.option(name)}`" for name in fixed.names))
        yield f"| {fixed.what} | {options} | {' '.join(f'`{flag}`' for flag in fixed.unless.split())} |"
    yield ""


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
