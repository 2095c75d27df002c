# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""`torchrun` for one node of a SLURM job: same arguments, three differences.

- The node's rank comes from SLURM_NODEID.
- SIGUSR1, which the scheduler sends before the time limit, is forwarded to the workers. They save and exit without a
  deadline. torchrun dies of SIGUSR1, and kills its workers 30 seconds after SIGTERM.
- The exit status is that of the first worker that ended; torchrun returns 1. A job script can so tell a run that saved
  from one that failed. For a worker that a signal ended it is 128 + the signal's number, as in a shell.
"""

import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run


def children(parent: int) -> list[int]:
    """Process ids of the direct children of `parent`, from /proc (SLURM's nodes run Linux)."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The second field is the command's name in parentheses and may contain anything. The parent is the
            # second field after it (proc(5)).
            after_name = status.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # ended meanwhile
        if int(after_name[1]) == parent:
            found.append(int(status.parent.name))
    return found


def _forward(signal_number: int, _frame: FrameType | None) -> None:
    for child in children(os.getpid()):
        try:
            os.kill(child, signal_number)
        except ProcessLookupError:
            continue  # ended meanwhile


def _status(failures: Sequence[tuple[int, int]]) -> int:
    """Exit status for workers that failed, each given as (time in seconds, exit code); code -N is signal N."""
    # The launcher itself sends SIGTERM to the workers that are left. Times are in whole seconds, so theirs may equal
    # that of the first.
    _, code = min(failures, key=lambda failure: (failure[1] == -signal.SIGTERM, failure[0]))
    return code if code > 0 else 128 - code


def main(arguments: Sequence[str]) -> int:
    """Exit status for the scheduler; 2 for an address that does not resolve."""
    options = parse_args(["--node-rank", os.environ.get("SLURM_NODEID", "0"), *arguments])
    try:
        socket.getaddrinfo(options.master_addr, options.master_port)
    except OSError as error:
        # torchrun would fall back to its own host and wait for the other nodes for ever.
        print(f"--master-addr {options.master_addr} does not resolve on this node: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGUSR1, _forward)
    try:
        run(options)
    except ChildFailedError as failure:
        print(failure, file=sys.stderr)
        return _status([(worker.timestamp, worker.exitcode) for worker in failure.failures.values()])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
