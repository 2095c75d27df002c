# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""`torchrun` for one node of a SLURM job: same arguments, four differences.

- The node's rank comes from SLURM_NODEID.
- The launchers of all nodes meet first. The one of the first node names those that do not come in time, by HOSTS: names
  of the nodes with spaces between them.
- SIGUSR1, which the scheduler sends before the time limit, is forwarded to the workers. They save and exit without a
  deadline. torchrun dies of SIGUSR1, and kills its workers 30 seconds after SIGTERM.
- The exit status is that of the first worker that ended; torchrun returns 1. A job script can so tell a run that saved
  from one that failed. For a worker that a signal ended it is 128 + the signal's number, as in a shell.
"""

import os
import signal
import socket
import sys
from argparse import Namespace
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType

from torch.distributed import DistError, DistNetworkError, TCPStore
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


class Missing(Exception):
    """The launchers of all nodes do not meet; the message says why."""


def meet(options: Namespace) -> TCPStore:
    """Wait for the launchers of all nodes, up to the timeout of --rdzv-conf.

    Returns:
        The store at the master's port. torchrun uses the same one while it is kept.

    Raises:
        Missing: names the nodes that did not come, or the port that is taken.
    """
    seconds = int(dict(pair.split("=") for pair in options.rdzv_conf.split(",") if pair).get("timeout", 600))
    first, nodes, address = options.node_rank == 0, int(options.nnodes), f"{options.master_addr}:{options.master_port}"
    names = os.environ.get("HOSTS", "").split()
    keys = [f"launcher/{node}" for node in range(nodes)]
    patience = timedelta(seconds=seconds)
    try:
        at = (options.master_addr, options.master_port)
        store = TCPStore(*at, None, first, patience, wait_for_workers=False, multi_tenant=True)
    except DistNetworkError as error:
        if first:
            raise Missing(f"port {address} cannot be opened here; another process may hold it: {error}") from None
        raise Missing(f"the first node does not answer at {address} for {seconds} s") from None
    store.set(keys[options.node_rank], socket.gethostname())
    try:
        if first:
            store.wait(keys, patience)
            store.set("launchers met", "")
        else:
            store.wait(["launchers met"], 2 * patience)
    except DistError:
        if not first:
            raise Missing("the first node has ended, or waits for others; its messages say for which") from None
        absent = [node for node, key in enumerate(keys) if not store.check([key])]
        named = ", ".join(f"{names[node] if node < len(names) else '?'} (node {node})" for node in absent)
        raise Missing(f"{len(absent)} of {nodes} nodes did not start within {seconds} s: {named}") from None
    return store


def main(arguments: Sequence[str]) -> int:
    """Exit status for the scheduler; 2 for an address that does not resolve, 1 for nodes that do not start."""
    options = parse_args(["--node-rank", os.environ.get("SLURM_NODEID", "0"), *arguments])
    try:
        socket.getaddrinfo(options.master_addr, options.master_port)
    except OSError as error:
        # torchrun would fall back to its own host and wait for the other nodes for ever.
        print(f"--master-addr {options.master_addr} does not resolve on this node: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGUSR1, _forward)
    try:
        _store = meet(options) if options.nnodes.isdigit() and options.nnodes != "1" else None
        run(options)
    except Missing as missing:
        print(f"launch.py: {missing}", file=sys.stderr)
        return 1
    except ChildFailedError as failure:
        print(failure, file=sys.stderr)
        return _status([(worker.timestamp, worker.exitcode) for worker in failure.failures.values()])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
