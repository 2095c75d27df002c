# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Command lines of tools that report all wrong arguments at once: every value is a string until the tool checks it."""

import argparse
import sys
from collections.abc import Sequence


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser whose errors are exceptions."""
    return argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Values as strings, and a problem for each unknown argument.

    Raises:
        ValueError: an option without its value.
    """
    try:
        values, unknown = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from error
    return values, [f"unknown argument {argument!r}" for argument in unknown]


def refuse(tool: str, problems: ValueError) -> int:
    """Print one line for each problem; return the exit status."""
    lines = "\n".join(f"  - {line}" for line in str(problems).splitlines())
    print(f"{tool}: wrong arguments\n{lines}", file=sys.stderr)
    return 2
