# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The commands of `megatron-async`; each module's `main(argv)` returns the exit status."""

import argparse
import sys
from collections.abc import Iterable

USAGE_ERROR = 2


def make_parser(command: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of a command. The description keeps its lines."""
    return argparse.ArgumentParser(
        prog=f"megatron-async {command}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def refuse(command: str, outcome: str, reasons: Iterable[object]) -> int:
    """Say what was not done, and every reason, on standard error; return the exit status."""
    print(f"megatron-async {command}: {outcome}", *reasons, sep="\n  - ", file=sys.stderr)
    return USAGE_ERROR
