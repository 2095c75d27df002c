# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Versions and machine that a figure depends on."""

import hashlib
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import megatron_async
from megatron_async.mcore import installed_versions


def versions() -> dict[str, str]:
    """Versions of this package, Python, torch and the Megatron packages."""
    import torch  # its metadata leave out the CUDA version

    return {
        "megatron_async": megatron_async.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "megatron-core": version("megatron-core"),
        "emerging-optimizers": version("emerging-optimizers"),
    }


def of_job() -> dict[str, str]:
    """What must be equal on all hosts of a job: versions, and a digest of this package's source."""
    import torch

    digest, root = hashlib.sha256(), Path(megatron_async.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    packages = {package: installed or "none" for package, installed, *_ in installed_versions()}
    return (
        {"python": platform.python_version(), "torch": torch.__version__}
        | packages
        | {"code of megatron_async": digest.hexdigest()[:12]}
    )


def machine() -> dict[str, Any]:
    """System, processor and cores, without the name of the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "processor": _processor(),
        "usable_cores": cores,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
