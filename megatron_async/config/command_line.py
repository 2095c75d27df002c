# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Reads single options of a command line without a parser. Imports nothing that takes time."""

from collections.abc import Collection, Sequence


def value_of(argv: Sequence[str], flag: str) -> str | None:
    """Last value given for `flag`, as `--flag value` or `--flag=value`; None where it is not given."""
    value = None
    for index, token in enumerate(argv):
        if token == flag and index + 1 < len(argv):
            value = argv[index + 1]
        elif token.startswith(flag + "="):
            value = token.partition("=")[2]
    return value


def without(argv: Sequence[str], flags: Collection[str]) -> list[str]:
    """`argv` without these options and their values."""
    kept, left_out = [], False
    for token in argv:
        if token.startswith("--"):
            left_out = token.partition("=")[0] in flags
        if not left_out:
            kept.append(token)
    return kept
