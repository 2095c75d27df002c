# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Versions: what a run needs, and what a GPU machine can have."""

import platform
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist

from megatron_async.doctor.finding import Finding, unless
from megatron_async.mcore import installed_versions
from megatron_async.platform.packages import OPTIONAL, OptionalPackage

_PYTHON, _TORCH = (3, 12), (2, 9)
"""Oldest versions, as in setup.py."""


def findings(gpus: int) -> Iterator[Finding]:
    """Findings on a machine with so many GPUs."""
    yield unless(sys.version_info >= _PYTHON, "FAIL", "python", platform.python_version(), "use Python 3.12 or newer")
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    yield unless(
        release >= _TORCH, "FAIL", "torch", f"{torch.__version__}, built for {built}", "pip install 'torch>=2.9'"
    )
    for package, installed, fits, tested, requirement in installed_versions():
        found = f"{installed or 'not installed'}; tested with {tested}"
        yield unless(fits, "FAIL", package, found, f"pip install '{requirement}'")
    for optional in OPTIONAL:
        yield _optional(optional, gpus)
    yield from _backends(gpus)


def _optional(package: OptionalPackage, gpus: int) -> Finding:
    found = f"{package.version or 'not installed'}; fits: {package.fits or 'any'}; not tested with this package"
    if not gpus and not package.usable:
        return Finding(package.name, "OK", f"{found}; without a GPU nothing needs it")
    return unless(package.usable, "WARN", package.name, found, f"off: {package.off}. {package.install}")


def _backends(gpus: int) -> Iterator[Finding]:
    yield unless(
        dist.is_gloo_available(),
        "FAIL",
        "torch.distributed: gloo",
        "available" if dist.is_gloo_available() else "not built into this torch",
        "runs on CPUs need it; install torch from the package index",
    )
    nccl = dist.is_nccl_available()
    version = ".".join(map(str, torch.cuda.nccl.version())) if nccl else "not built into this torch"
    yield unless(nccl or not gpus, "FAIL", "torch.distributed: nccl", version, "install a torch that is built for CUDA")
