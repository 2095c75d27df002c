# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Reads single options of a command line without a parser. Imports nothing that takes time."""

from collections.abc import Sequence


def value_of(argv: Sequence[str], flag: str) -> str | None:
    """Last value given for `flag`, as `--flag value` or `--flag=value`; None where it is not given."""
    value = None
    for index, token in enumerate(argv):
        if token == flag and index + 1 < len(argv):
            value = argv[index + 1]
        elif token.startswith(flag + "="):
            value = token.partition("=")[2]
    return value


def without_option(argv: Sequence[str], flag: str) -> list[str] | None:
    """`argv` without the first `flag` and its values; None where it is not given."""
    for index, token in enumerate(argv):
        if token == flag or token.startswith(flag + "="):
            end = index + 1
            while end < len(argv) and not argv[end].startswith("--"):
                end += 1
            return [*argv[:index], *argv[end:]]
    return None
