# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Hosts of a cluster on one machine: network namespaces with names and addresses of their own. Needs root, iproute2."""

import itertools
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_numbers = itertools.count()
_INSIDE = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'


def missing() -> str:
    """Why there can be no hosts; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in ("ip", "nsenter", "unshare", "mount") if shutil.which(tool) is None]
    return f"{', '.join(absent)} not installed" if absent else ""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Hosts:
    """Hosts that share the file system and are joined by a bridge; this process is reached as `head`.

    Args:
        folder: for the table of names.
        names: of the hosts.
    """

    def __init__(self, folder: Path, names: Sequence[str] = ("node1", "node2")) -> None:
        self.names = tuple(names)
        number = next(_numbers)
        network = f"10.77.{number}"
        self.head = f"{network}.1"
        self.addresses = {name: f"{network}.{host}" for host, name in enumerate(names, start=11)}
        self._tag = f"ma{os.getpid()}x{number}"
        self._table = folder / "hosts"
        rows = [f"{address} {name}" for name, address in {"head": self.head, **self.addresses}.items()]
        self._table.write_text("127.0.0.1 localhost\n" + "\n".join(rows) + "\n", encoding="utf-8")

    def __enter__(self) -> Self:
        bridge = f"{self._tag}b"
        _ip("link", "add", bridge, "type", "bridge")
        _ip("addr", "add", f"{self.head}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for name, address in self.addresses.items():
            space, plug = f"{self._tag}-{name}", self._plug(name)
            _ip("netns", "add", space)
            _ip("link", "add", plug, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", plug, "master", bridge, "up")
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "link", "set", "lo", "up")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for name in self.names:
            _ip("netns", "del", f"{self._tag}-{name}")
        _ip("link", "del", f"{self._tag}b")

    def _plug(self, name: str) -> str:
        return f"{self._tag}p{self.names.index(name)}"

    def cut(self, name: str) -> None:
        """Cut the link of a host to all others; nobody is told."""
        _ip("link", "set", self._plug(name), "down")

    def join(self, name: str) -> None:
        """Mend the link of a host."""
        _ip("link", "set", self._plug(name), "up")

    def on(self, name: str, *command: str) -> list[str]:
        """A command line that runs `command` on a host."""
        # `ip netns exec` would hide the mounts below /sys, which slurmd needs.
        space = (f"--net=/run/netns/{self._tag}-{name}", "unshare", "--uts", "--mount")
        return ["nsenter", *space, "sh", "-c", _INSIDE, "sh", name, str(self._table), *command]

    def processes(self, name: str) -> list[int]:
        """Ids of all processes on a host."""
        listed = subprocess.check_output(["ip", "netns", "pids", f"{self._tag}-{name}"], text=True)
        return [int(word) for word in listed.split()]

    def start(self, name: str, *command: str, **options: Any) -> subprocess.Popen[str]:
        """Start a command on a host; its process id is that of the command."""
        return subprocess.Popen(self.on(name, *command), text=True, **options)
