# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Entry point: `torchrun --nproc-per-node N -m megatron_async.pretrain [any Megatron-LM argument] [ours]`."""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence

from megatron_async import platform

USAGE_ERROR = 2


def main(argv: Sequence[str]) -> int:
    """Run what the command line asks for; return the exit status."""
    # Megatron warns at import about optional packages; what is missing and needed is reported by name later.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    requested = argv[argv.index("--device") + 1] if "--device" in argv[:-1] else "auto"
    try:
        device, _ = platform.choose(requested)
    except ValueError:
        device = "cpu"  # reported with every other problem below
    platform.activate(device)

    from megatron_async import arguments

    if arguments.asks_for_list(argv):
        return _list_presets()
    try:
        args = arguments.parse(argv)
    except arguments.ArgumentProblems as wrong:
        if int(os.environ.get("RANK", "0")) == 0:
            sys.stderr.write(_message(wrong.problems))
        return USAGE_ERROR

    if args.dry_run:
        return _dry_run(args)

    from megatron_async.training import run

    run.pretrain(args)
    return 0


def _list_presets() -> int:
    if int(os.environ.get("RANK", "0")) == 0:
        from rich.console import Console

        from megatron_async.planning.listing import preset_table

        Console(width=None if sys.stdout.isatty() else 150).print(preset_table())
    return 0


def _dry_run(args: argparse.Namespace) -> int:
    if int(os.environ.get("RANK", "0")) == 0:
        from megatron_async.planning import dry_run

        dry_run.run(args)
    return 0


def _message(problems: Sequence[str]) -> str:
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, 1))
    return f"megatron_async: {count} with the arguments; nothing was started.\n{lines}\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
