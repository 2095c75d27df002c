# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""`torchrun` for one node of a SLURM job: same arguments, three differences.

- The node's rank comes from SLURM_NODEID.
- SIGUSR1, which the scheduler sends before the time limit, goes to the workers, who save and leave in their
  own time. torchrun would die of it, and on SIGTERM gives its workers 30 seconds whatever a save takes.
- The exit status is that of the worker that ended first, where torchrun says 1, so that a job script can tell
  a run that saved and wants to go on from one that failed. A worker that a signal ended counts as 128 + the
  signal's number, as in a shell.
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
    """Process ids of a process' direct children, from /proc (SLURM's nodes run Linux)."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The second field is the command's name in parentheses and may hold anything; the parent is the
            # second field after it (proc(5)).
            after_name = status.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # ended meanwhile
        if int(after_name[1]) == parent:
            found.append(int(status.parent.name))
    return found


def _pass_on(signal_number: int, _frame: FrameType | None) -> None:
    for child in children(os.getpid()):
        try:
            os.kill(child, signal_number)
        except ProcessLookupError:
            continue  # ended meanwhile


def _status(failures: Sequence[tuple[int, int]]) -> int:
    """Exit status to report for workers that failed: (second, exit code), a code of -N for signal N."""
    # SIGTERM is the launcher's own, for those that were still there when another had ended; times are in whole
    # seconds, so theirs may be the same.
    _, code = min(failures, key=lambda failure: (failure[1] == -signal.SIGTERM, failure[0]))
    return code if code > 0 else 128 - code


def main(arguments: Sequence[str]) -> int:
    """Exit status for the scheduler; 2 for an address that does not resolve."""
    options = parse_args(["--node-rank", os.environ.get("SLURM_NODEID", "0"), *arguments])
    try:
        socket.getaddrinfo(options.master_addr, options.master_port)
    except OSError as error:
        # A launcher that fell back to its own host would wait for the others for ever.
        print(f"--master-addr {options.master_addr} does not resolve on this node: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGUSR1, _pass_on)
    try:
        run(options)
    except ChildFailedError as failure:
        print(failure, file=sys.stderr)
        return _status([(worker.timestamp, worker.exitcode) for worker in failure.failures.values()])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
