# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Faults of a cluster. Each is over when its function returns; daemons that were killed are started again by then."""

import errno
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.slurm import Cluster


@dataclass(frozen=True)
class Target:
    """What faults may hit: a cluster, and the file system `disk` on which the run saves."""

    cluster: Cluster
    disk: Path
    generator: random.Random

    def node(self) -> str:
        return self.generator.choice(self.cluster.machines.names)

    def rank(self) -> int | None:
        """Process of a random rank; None if none runs."""
        ranks = [pid for name in self.cluster.machines.names for pid in self.cluster.machines.processes(name)]
        ranks = [pid for pid in ranks if is_rank(pid)]
        return self.generator.choice(ranks) if ranks else None

    def wait(self, least: float, most: float) -> None:
        time.sleep(self.generator.uniform(least, most))


def is_rank(pid: int) -> bool:
    """Whether a process is a rank of a run, not its launcher."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False  # ended meanwhile
    return words[1:4] == [b"-u", b"-m", b"megatron_async.pretrain"]


def _send(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def kill_rank(target: Target) -> bool:
    pid = target.rank()
    return pid is not None and _send(pid, signal.SIGKILL)


def freeze_rank(target: Target) -> bool:
    """Stopped for 2 to 30 seconds."""
    pid = target.rank()
    if pid is None or not _send(pid, signal.SIGSTOP):
        return False
    target.wait(2, 30)
    _send(pid, signal.SIGCONT)
    return True


def kill_node(target: Target) -> bool:
    """The daemon of a node and everything on it; back within 15 seconds."""
    name = target.node()
    target.cluster.kill_node(name)
    target.wait(0, 15)
    target.cluster.start_node(name)
    return True


def kill_controller(target: Target) -> bool:
    """Back within 10 seconds."""
    target.cluster.kill_controller()
    target.wait(0, 10)
    target.cluster.start_controller()
    return True


def fill_disk(target: Target) -> bool:
    """No byte is free for 2 to 15 seconds."""
    ballast = target.disk / "ballast"
    end = time.monotonic() + target.generator.uniform(2, 15)
    with ballast.open("wb", buffering=0) as file:
        while time.monotonic() < end:  # what the run deletes is taken too
            try:
                file.write(bytes(1 << 16))
            except OSError as full:
                if full.errno != errno.ENOSPC:
                    raise
                time.sleep(0.1)
    ballast.unlink()
    return True


def cut_link(target: Target) -> bool:
    """A node reaches no other host for 1 to 20 seconds; after 10 the controller gives it up."""
    name = target.node()
    target.cluster.machines.cut(name)
    target.wait(1, 20)
    target.cluster.machines.join(name)
    return True


FAULTS: dict[str, Callable[[Target], bool]] = {
    "rank killed": kill_rank,
    "rank frozen": freeze_rank,
    "node killed": kill_node,
    "controller killed": kill_controller,
    "disk full": fill_disk,
    "link cut": cut_link,
}
"""Functions return whether there was something to hit: a job that waits has no ranks."""
