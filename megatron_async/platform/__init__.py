# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The device of a run: CUDA devices as Megatron-Core expects, or CPUs over gloo. Other packages are device-neutral."""

import gc
import os
import sys
import warnings
from pathlib import Path
from typing import Literal

from megatron_async.mcore import UnsupportedVersion, check_versions
from megatron_async.platform import cpu, gpu

Device = Literal["cpu", "cuda"]
DEVICE_CHOICES = ("auto", "cuda", "cpu")


def sees_gpu() -> bool:
    """Whether this rank has a GPU of its own: torch finds more of them than the number of the rank on its host."""
    import torch

    return torch.cuda.is_available() and torch.cuda.device_count() > _local_rank()


def choose(requested: str) -> tuple[Device, str]:
    """Resolve `--device` to a device and a sentence with the reason.

    Raises:
        ValueError: for `cuda` on a machine where torch finds no usable GPU.
    """
    import torch

    available = sees_gpu()
    if requested == "cpu":
        return "cpu", "device: cpu (requested), gloo"
    if requested == "cuda" and not available:
        found = torch.cuda.device_count() or "no"
        raise ValueError(
            f"--device cuda, but torch finds {found} usable CUDA device here for local rank {_local_rank()}. Use "
            "--device cpu, start fewer processes, or check the driver: python -m megatron_async.doctor."
        )
    if available:
        return "cuda", f"device: cuda ({torch.cuda.get_device_name(_local_rank())}), nccl"
    return "cpu", "device: cpu (torch finds no CUDA device), gloo"


def activate(device: Device) -> None:
    """Prepare this process for `device`, before Megatron is imported. A second call changes nothing.

    Raises:
        UnsupportedVersion: the installed Megatron-Core or emerging-optimizers is outside the tested range.
    """
    check_versions()
    # Megatron warns at import about optional packages. A missing one that a run needs is reported by name.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    if device == "cpu":
        # Megatron demands it for tensor parallelism on the GPUs that it believes to have; nothing reads it.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        cpu.prepare()
    else:
        gpu.set_environment(one_queue=False)
    collecting = gc.isenabled()
    gc.disable()  # what the imports make stays; looking through it for garbage took a third of a short command's time
    try:
        from megatron_async.mcore import messages, patches  # imports torch

        messages.hide()
        if patches.install(device):
            gc.freeze()
    finally:
        if collecting:
            gc.enable()


def activate_or_exit(device: Device) -> None:
    """`activate`, for tools: with an untested version, end the process with its message and status 2."""
    try:
        activate(device)
    except UnsupportedVersion as unsupported:
        sys.stderr.write(f"{Path(sys.argv[0]).name}: {unsupported}\n")
        raise SystemExit(2) from None


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))
