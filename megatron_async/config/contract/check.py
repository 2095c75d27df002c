# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Holds a command line against the contract."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

from megatron_async.config.contract.row import CONDITIONS, Row, read

ROWS = read()


def rows_of(flag: str) -> list[tuple[Row, str | None]]:
    """Rows of a flag (without leading dashes), each with the one value that it is about, or None.

    Those that name it; a family such as `rl-*` is for flags that no row names.
    """
    named = [(row, value) for row in ROWS for name, value in row.entries if name == flag]
    return named or [(row, None) for row in ROWS for name, _ in row.entries if fnmatch(flag, name)]


def problems(args: argparse.Namespace, given: Mapping[str, str], parser: argparse.ArgumentParser) -> Iterator[str]:
    """Refused options among those that a command line names; each is set back to its default.

    Args:
        given: flag of the table -> destination, of the options that the command line names.
    """
    # Two options may share a destination; argparse takes the default of the first.
    defaults = {action.dest: action.default for action in reversed(parser._actions)}
    for flag, row, destination in list(_holding(args, given, "refused")):
        value, default = getattr(args, destination), defaults[destination]
        if value != default:
            yield f"{_words(flag, value)}: {row.reason}{f' ({row.when})' if row.when else ''}. {row.instead}"
            setattr(args, destination, default)


def notices(args: argparse.Namespace, given: Mapping[str, str]) -> list[str]:
    """One line for each option that the command line names and that does nothing here."""
    return [f"--{flag} has no effect here: {row.reason}." for flag, row, _ in _holding(args, given, "inert here")]


def _holding(args: argparse.Namespace, given: Mapping[str, str], status: str) -> Iterator[tuple[str, Row, str]]:
    """(flag, row, destination) of the given options whose row of this status holds."""
    for flag, destination in given.items():
        for row, value in rows_of(flag):
            fits = value is None or value in _spelled(getattr(args, destination))
            if row.status == status and fits and CONDITIONS[row.when](args):
                yield flag, row, destination


def _spelled(value: Any) -> Sequence[str]:
    """A value as a command line spells it."""
    values = value if isinstance(value, list | tuple) else (value,)
    return [getattr(one, "name", str(one)) for one in values]


def _words(flag: str, value: Any) -> str:
    """An option as the command line gave it."""
    return f"--{flag}" if isinstance(value, bool) else f"--{flag} {' '.join(_spelled(value))}"
