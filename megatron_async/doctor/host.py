# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The host: port of the rendezvous, folders, shared memory, limits of a process."""

import getpass
import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megatron_async.doctor.finding import Finding, unless

_GIB = 2**30
_SHARED_MEMORY = _GIB
"""Docker gives 64 MB; NCCL and the workers of data loaders take some hundred MB a host."""
_OPEN_FILES = 4096
"""A rank has a socket for each peer of each gloo group, and one for each worker of a data loader."""
_FREE_DISK = 10 * _GIB


def findings(gpus: int, in_job: bool) -> Iterator[Finding]:
    """Findings about this host.

    Args:
        gpus: number of GPUs.
        in_job: whether a launcher has started this process; the rendezvous' port is in use then.
    """
    yield port(os.environ.get("MASTER_PORT", "29500"), in_job)
    for name, (folder, change) in folders().items():
        yield writable(name, folder, change)
    yield _shared_memory()
    yield from _limits(gpus)


def port(text: str, in_job: bool) -> Finding:
    """Whether the port of the rendezvous, the value of MASTER_PORT, is free."""
    name = f"port {text}"
    if not text.isdecimal() or not 0 < (number := int(text)) < 1 << 16:
        return Finding(name, "FAIL", "not a number from 1 to 65535", "set MASTER_PORT to one, or unset it")
    if in_job:
        return Finding(name, "OK", "the rendezvous of this job uses it")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", number))
        except OSError as error:
            change = "give torchrun another --master-port (or --rdzv-endpoint HOST:PORT)"
            return Finding(name, "WARN", f"not free: {error.strerror}", change)
    return Finding(name, "OK", "free for the rendezvous")


def folders() -> dict[str, tuple[Path, str]]:
    """Folders that runs and libraries write to, each with what to change where it cannot be written."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    temporary = Path(tempfile.gettempdir())
    by_variable = {
        "HF_HOME": cache / "huggingface",
        "TRITON_CACHE_DIR": Path.home() / ".triton",
        "TORCHINDUCTOR_CACHE_DIR": temporary / f"torchinductor_{getpass.getuser()}",
        "TMPDIR": temporary,
    }
    return {
        "runs/": (Path("runs"), "start runs elsewhere, or give --save and --metrics-file"),
        **{
            variable: (Path(os.environ.get(variable) or default), f"set {variable} to a folder that can be written to")
            for variable, default in by_variable.items()
        },
    }


def writable(name: str, folder: Path, change: str) -> Finding:
    """Whether a file can be made in a folder or, where it does not exist, in the nearest one above it."""
    existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            free = shutil.disk_usage(existing).free
    except OSError as error:
        return Finding(f"folder {name}", "FAIL", f"{folder} cannot be written to: {error.strerror}", change)
    found = f"{folder}, {free / _GIB:.0f} GiB free"
    return unless(free > _FREE_DISK, "WARN", f"folder {name}", found, f"make room, or {change}")


def _shared_memory() -> Finding:
    folder = Path("/dev/shm")
    if not folder.exists():
        return Finding("shared memory", "WARN", "no /dev/shm", "NCCL and the workers of data loaders need it: mount it")
    size = shutil.disk_usage(folder).total
    change = "start the container with --ipc=host or --shm-size=8g"
    return unless(size >= _SHARED_MEMORY, "WARN", "shared memory", f"{size / _GIB:.1f} GiB", change)


def _limits(gpus: int) -> Iterator[Finding]:
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{_limit(files)} (hard limit {_limit(most)})"
    change = f"ulimit -n {_OPEN_FILES if most < 0 else min(most, 65536)} before the launcher"
    yield unless(files < 0 or files >= _OPEN_FILES, "WARN", "open files", found, change)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    change = "ulimit -l unlimited, or --ulimit memlock=-1 for a container: NCCL pins memory for transfers between hosts"
    yield unless(locked < 0 or gpus == 0, "WARN", "locked memory", _limit(locked), change)


def _limit(value: int) -> str:
    return "unlimited" if value < 0 else f"{value:,}"
