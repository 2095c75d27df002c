# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""One run at a time saves to a folder. Rank 0 holds a lock file there and touches it every few seconds.

No clocks are compared. A process of this host is looked up; a lock of another host counts as left behind if nobody
touches it while this run watches.
"""

import json
import logging
import os
import socket
import threading
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

NAME = ".lock"
HEARTBEAT_SECONDS = 5.0
WATCH_SECONDS = 30.0

_log = logging.getLogger(__name__)


class InUse(ValueError):
    """Another run saves to the folder; the message names its host and process."""


class FolderLock:
    """Takes the lock of `root`, which is created; waits up to `watch` seconds for a sign of life of another host's run.

    Raises:
        InUse: a run that lives holds it.
        OSError: the folder cannot be written to.
    """

    def __init__(self, root: Path, watch: float = WATCH_SECONDS) -> None:
        self._path = root / NAME
        self._own = _this_process() | {"since": datetime.now(UTC).isoformat(timespec="seconds"), "id": uuid.uuid4().hex}
        self._released = threading.Event()
        root.mkdir(parents=True, exist_ok=True)
        while not self._create():
            other = _read(self._path)
            if other is not None and _lives(self._path, other, watch):
                raise InUse(_sentence(root, other))
            self._remove(other)
        threading.Thread(target=self._beat, name="lock of the save folder", daemon=True).start()

    def check(self) -> None:
        """Raise InUse if another run has taken the folder, as it may while this one was frozen."""
        other = _read(self._path)
        if other != self._own:
            raise InUse(_sentence(self._path.parent, other or {}))

    def release(self) -> None:
        """Give the folder free. Does nothing the second time."""
        if not self._released.is_set():
            self._released.set()
            self._remove(self._own)

    def _create(self) -> bool:
        try:
            with self._path.open("x", encoding="utf-8") as file:
                json.dump(self._own, file)
        except FileExistsError:
            return False
        return True

    def _remove(self, holder: dict[str, Any] | None) -> None:
        """Remove the lock if it is still this holder's. Of several runs that try, one succeeds."""
        aside = self._path.with_name(f"{NAME}.{self._own['id']}")
        try:
            os.rename(self._path, aside)
        except FileNotFoundError:
            return
        if _read(aside) == holder:
            aside.unlink()
        else:  # another run was faster
            os.rename(aside, self._path)

    def _beat(self) -> None:
        while not self._released.wait(HEARTBEAT_SECONDS):
            try:
                if _read(self._path) != self._own:
                    return
                os.utime(self._path)
            except OSError:
                continue  # a file server that is away for a while


def _this_process() -> dict[str, Any]:
    """Where a process lives, and what tells it from a later one with its number."""
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "boot": _text("/proc/sys/kernel/random/boot_id"),
        "namespace": os.readlink("/proc/self/ns/pid") if Path("/proc/self/ns/pid").exists() else "",
        "pid": pid,
        "started": _started(pid),
        "job": os.environ.get("SLURM_JOB_ID", ""),
    }


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Start of a process in clock ticks since boot, proc(5) field 22; empty if there is none."""
    fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else ""


def _read(path: Path) -> dict[str, Any] | None:
    """The holder of a lock; an empty one while it is being written or if it is damaged, None without a file."""
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


def _lives(path: Path, holder: dict[str, Any], watch: float) -> bool:
    own = _this_process()
    if all(holder.get(key) == own[key] for key in ("host", "boot", "namespace")):
        same = holder.get("pid") == own["pid"]  # an earlier run of this process
        return not same and bool(holder.get("started")) and _started(int(holder["pid"])) == holder["started"]
    _log.warning("> %s is of host %s; watching it for %g s", path, holder.get("host", "?"), watch)
    before, end = _touched(path), time.monotonic() + watch
    while time.monotonic() < end:
        time.sleep(min(1.0, watch))
        if _touched(path) != before:
            return True
    return False


def _touched(path: Path) -> int:
    """Time of the last touch. Opening the file makes a network file system ask its server."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return 0


def _sentence(root: Path, holder: dict[str, Any]) -> str:
    job = f", SLURM job {holder['job']}" if holder.get("job") else ""
    return (
        f"--save {root} is in use: process {holder.get('pid', '?')} on host {holder.get('host', '?')}{job} saves to it "
        f"since {holder.get('since', '?')}. End that run, or name another folder."
    )
