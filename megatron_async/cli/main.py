# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""`megatron-async COMMAND [options]`: one console script for all commands."""

import difflib
import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

from megatron_async import __version__
from megatron_async.launcher import end_with_launcher


class Command(NamedTuple):
    """One command: the module that holds it, and its line in the help."""

    module: str
    help: str
    function: str = "main"


COMMANDS = {
    "quickstart": Command("megatron_async.cli.quickstart", "train three small runs on two CPU processes and compare"),
    "pretrain": Command("megatron_async.pretrain", "train as one process; see below for more", "run_to_exit"),
    "doctor": Command("megatron_async.doctor.__main__", "is this machine, or every host of a job, ready"),
    "plan": Command("megatron_async.cli.plan", "the fastest layouts of a run on 8 to 16,384 devices"),
    "timeline": Command("megatron_async.cli.timeline", "a run's measured timeline beside its plan, idle time by cause"),
    "preprocess": Command("megatron_async.cli.preprocess", "texts to Megatron's data files"),
    "convert": Command("megatron_async.cli.convert", "checkpoints from and to Hugging Face folders"),
    "evaluate": Command(
        "megatron_async.cli.evaluate", "lm-eval on a Hugging Face folder, by default the paper's tasks"
    ),
}
"""The console script's commands, imported when they are called."""

_USAGE = """\
usage: megatron-async COMMAND [options]

{commands}

`megatron-async COMMAND --help` lists the options of a command; `megatron-async --version` prints the version.
A run of several processes is started by a launcher:
  torchrun --nproc-per-node N -m megatron_async.pretrain [any Megatron-LM argument] [ours]
"""


def _usage() -> str:
    width = max(map(len, COMMANDS))
    return _USAGE.format(commands="\n".join(f"  {name:{width}}  {entry.help}" for name, entry in COMMANDS.items()))


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out `COMMAND [options]`, by default this process's; return the exit status, 2 without a known command."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words in (["--version"], ["-V"]):
        print(f"megatron-async {__version__}")
        return 0
    if not words or words[0] in ("-h", "--help"):
        print(_usage(), end="")
        return 0 if words else 2
    name, *options = words
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        sys.stderr.write(f"megatron-async: {name}: no such command.{hint} There are {', '.join(COMMANDS)}.\n")
        return 2
    end_with_launcher()
    command = COMMANDS[name]
    status: int = getattr(importlib.import_module(command.module), command.function)(options)
    return status
