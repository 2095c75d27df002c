# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Versions and machine that a figure depends on."""

import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import megatron_async
from megatron_async.mcore import installed_versions


def versions() -> dict[str, str]:
    """Versions of this package, Python, torch and the Megatron packages."""
    import torch  # its metadata leave out the CUDA version

    packages = {package: installed or "none" for package, installed, *_ in installed_versions()}
    own = {"megatron_async": megatron_async.__version__, "python": platform.python_version()}
    return own | {"torch": str(torch.__version__)} | packages


def of_job() -> dict[str, str]:
    """What must be equal on all hosts of a job: versions, and a digest of this package's source."""
    digest, root = hashlib.sha256(), Path(megatron_async.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return versions() | {"code of megatron_async": digest.hexdigest()[:12]}


def machine() -> dict[str, Any]:
    """System, processor and cores, without the name of the machine."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "processor": next(names, "unknown"),
        "usable_cores": len(os.sched_getaffinity(0)),
    }
