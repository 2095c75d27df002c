# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""GPUs, the driver, the links between GPUs and between hosts, and the variables that CUDA reads."""

import itertools
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

from megatron_async.doctor.finding import Finding, unless
from megatron_async.platform.gpu import MOST_QUEUES, QUEUES

_GIB = 2**30
_BF16 = (8, 0)
"""Least compute capability with products in bf16."""
_BLACKWELL = 10


def findings(gpus: int) -> Iterator[Finding]:
    """Findings about the GPUs of this host; `gpus`: how many torch finds."""
    driver = _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")
    if gpus == 0:
        yield _no_gpu(driver)
    else:
        yield Finding("driver", "OK", driver.splitlines()[0] if driver else "nvidia-smi is not on PATH")
        for number in range(gpus):
            yield _gpu(number)
        yield from _links(gpus)
    yield from _network(gpus)
    yield from _variables(gpus)


def _no_gpu(driver: str) -> Finding:
    if driver or Path("/dev/nvidiactl").exists():
        change = "the driver is too old for this torch, or CUDA_VISIBLE_DEVICES hides the GPUs; or give --device cpu"
        return Finding("GPUs", "FAIL", f"torch finds none, but there is a driver {driver.split()[:1]}", change)
    return Finding("GPUs", "OK", "none: runs use CPUs over gloo; there are no links between GPUs to look at")


def _gpu(number: int) -> Finding:
    properties = torch.cuda.get_device_properties(number)
    capability = (properties.major, properties.minor)
    free, total = torch.cuda.mem_get_info(number)
    found = f"{properties.name}, {total / _GIB:.0f} GiB ({free / _GIB:.0f} free), compute capability {capability}"
    name = f"GPU {number}"
    if capability < _BF16:
        return Finding(name, "WARN", found, "--bf16 needs compute capability 8.0 (Ampere) or newer")
    return unless(free > total / 2, "WARN", name, found, "another process uses it: nvidia-smi shows which")


def _links(gpus: int) -> Iterator[Finding]:
    pairs = list(itertools.combinations(range(gpus), 2))
    if not pairs:
        yield Finding("links between GPUs", "OK", "one GPU")
        return
    apart = [
        f"{a}-{b}"
        for a, b in pairs
        if not (torch.cuda.can_device_access_peer(a, b) and torch.cuda.can_device_access_peer(b, a))
    ]
    kinds = Counter(link_kinds(_nvidia_smi("topo", "-m")).values())
    found = ", ".join(f"{count} x {kind}" for kind, count in kinds.items()) or "kinds unknown (nvidia-smi topo -m)"
    found += f"; {len(pairs) - len(apart)} of {len(pairs)} pairs reach each other's memory"
    change = f"pairs {' '.join(apart)} send through host memory: place neighboring stages on other pairs"
    yield unless(not apart, "WARN", "links between GPUs", found, change)


def link_kinds(matrix: str) -> dict[tuple[int, int], str]:
    """Kinds of links, such as NV18 or SYS, by pair of GPUs, from the matrix of `nvidia-smi topo -m`."""
    rows = [line.split() for line in matrix.splitlines() if re.match(r"GPU\d+\s", line)]
    kinds: dict[tuple[int, int], str] = {}
    for row in rows:
        own = int(row[0].removeprefix("GPU"))
        kinds |= {(own, other): kind for other, kind in enumerate(row[1 : len(rows) + 1]) if own < other}
    return kinds


def _network(gpus: int) -> Iterator[Finding]:
    folder = Path("/sys/class/infiniband")
    adapters = sorted(entry.name for entry in folder.iterdir()) if folder.exists() else []
    found = ", ".join(adapters) or "no InfiniBand or RoCE adapter: between hosts NCCL uses sockets"
    change = "on several hosts the network is slow; load the adapters' driver (and give a container --network host)"
    yield unless(bool(adapters) or gpus == 0, "WARN", "network", found, change)


def _variables(gpus: int) -> Iterator[Finding]:
    value = os.environ.get(QUEUES)
    old = gpus > 0 and torch.cuda.get_device_capability(0)[0] < _BLACKWELL
    if value is None:
        found = f"not set; a run sets it to {MOST_QUEUES}, with 1f1b and tensor parallelism to 1"
        yield Finding(QUEUES, "OK", found)
    else:
        change = (
            f"unset it: delayed schedules refuse less than {MOST_QUEUES}, 1f1b with tensor parallelism before "
            "Blackwell all but 1"
        )
        yield unless(gpus == 0 or (value == str(MOST_QUEUES) and not old), "WARN", QUEUES, value, change)
    loading = os.environ.get("CUDA_MODULE_LOADING")
    change = "unset it: a kernel loaded at its first launch waits for posted receives"
    yield unless(
        loading in (None, "EAGER"), "WARN", "CUDA_MODULE_LOADING", loading or "not set; a run sets EAGER", change
    )


def _nvidia_smi(*arguments: str) -> str:
    """Output of nvidia-smi; "" where there is none or it fails."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    try:
        done = subprocess.run([command, *arguments], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
