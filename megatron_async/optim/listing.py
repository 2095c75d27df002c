# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""`--optimizer list`, and the same as tables for docs/optimizers.md."""

import sys
from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table

from megatron_async.optim import registry
from megatron_async.optim.options import all_options, options_of

SCOPES = {"matrix": "hidden matrices", "tensor": "all parameters", "element": "all parameters"}


def print_list(console: Console | None = None) -> None:
    """Print every optimizer with its description, state and options."""
    table = Table(title="--optimizer; 'the paper' is arXiv 2606.30634", show_lines=True)
    table.add_column("name", no_wrap=True)
    table.add_column("update, learning rate, links, state", overflow="fold")
    table.add_column("options (default, range)", overflow="fold")
    for spec in registry.specs():
        state = f"Steps on {SCOPES[spec.scope]}. State: {', '.join(spec.state)}; {spec.state_per_element} per element."
        options = [f"{option.flag} ({option.default}, {option.rule})" for option in options_of(spec.name)]
        options.insert(0, f"--weight-decay ({spec.hyperparameters().weight_decay})")
        table.add_row(spec.name, *("\n".join(cell).replace("[", r"\[") for cell in ([*spec.text, "", state], options)))
    (console or Console(width=None if sys.stdout.isatty() else 150)).print(table)


def markdown() -> str:
    """Two tables: optimizers, and their options."""
    optimizers = [["Name", "Update", "Steps on", "State", "Per element"]]
    for spec in registry.specs():
        update, state = "<br>".join(_cell(spec.text)), ", ".join(spec.state)
        optimizers.append([f"`{spec.name}`", update, SCOPES[spec.scope], state, spec.state_per_element])
    options = [["Option", "Default", "Range", "Meaning", "Source of the default"]]
    for option in all_options():
        options.append([f"`{option.flag}`", f"{option.default}", f"{option.rule}", option.help, option.source])
    return "\n".join([*_table(optimizers), "", *_table(options)])


def _cell(lines: Sequence[str]) -> Iterator[str]:
    """Formulas as code; other lines joined."""
    for formula, block in groupby(filter(str.strip, lines), key=lambda line: line.startswith("    ")):
        if formula:
            yield from (f"`{line.strip()}`" for line in block)
        else:
            yield " ".join(block)


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for row in (rows[0], ["---"] * len(rows[0]), *rows[1:]):
        yield "| " + " | ".join(row) + " |"
