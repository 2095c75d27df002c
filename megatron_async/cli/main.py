# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""`megatron-async COMMAND [options]`: one console script for all commands."""

import difflib
import pkgutil
import sys
from collections.abc import Sequence

from megatron_async import __version__
from megatron_async.launcher import end_with_launcher

COMMANDS = {
    "quickstart": ("megatron_async.cli.quickstart:main", "train three small runs on two CPU processes and compare"),
    "pretrain": ("megatron_async.pretrain:run_to_exit", "train as one process; see below for more"),
    "doctor": ("megatron_async.doctor.__main__:main", "is this machine, or every host of a job, ready"),
    "plan": ("megatron_async.cli.plan:main", "the fastest layouts of a run on 8 to 16,384 devices"),
    "timeline": ("megatron_async.cli.timeline:main", "a run's measured timeline beside its plan, idle time by cause"),
    "preprocess": ("megatron_async.cli.preprocess:main", "texts to Megatron's data files"),
    "convert": ("megatron_async.cli.convert:main", "checkpoints from and to Hugging Face folders"),
    "evaluate": ("megatron_async.cli.evaluate:main", "lm-eval on a Hugging Face folder, by default the paper's tasks"),
}
"""Command -> its function, imported when it is called, and its line in the help."""

_USAGE = """\
usage: megatron-async COMMAND [options]

{commands}

`megatron-async COMMAND --help` lists the options of a command; `megatron-async --version` prints the version.
A run of several processes is started by a launcher:
  torchrun --nproc-per-node N -m megatron_async.pretrain [any Megatron-LM argument] [ours]
"""


def _usage() -> str:
    width = max(map(len, COMMANDS))
    return _USAGE.format(commands="\n".join(f"  {name:{width}}  {help}" for name, (_, help) in COMMANDS.items()))


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
    status: int = pkgutil.resolve_name(COMMANDS[name][0])(options)
    return status
