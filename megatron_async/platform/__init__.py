# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The device of a run: CUDA devices as Megatron-Core expects, or CPUs over gloo. Other packages are device-neutral."""

import os
import sys
from pathlib import Path
from typing import Literal

from megatron_async.mcore import UnsupportedVersion, check_versions
from megatron_async.platform import cpu

Device = Literal["cpu", "cuda"]
DEVICE_CHOICES = ("auto", "cuda", "cpu")


def choose(requested: str) -> tuple[Device, str]:
    """Resolve `--device` to a device and a sentence with the reason.

    Raises:
        ValueError: for `cuda` on a machine where torch finds no usable GPU.
    """
    import torch

    available = torch.cuda.is_available()
    if requested == "cpu":
        return "cpu", "device: cpu (requested), gloo"
    if requested == "cuda" and not available:
        raise ValueError(
            "--device cuda, but torch finds no usable CUDA device here. Use --device cpu, or check the driver "
            "(torch.cuda.is_available() must be True)."
        )
    if available:
        return "cuda", f"device: cuda ({torch.cuda.get_device_name(0)}), nccl"
    return "cpu", "device: cpu (torch finds no CUDA device), gloo"


def activate(device: Device) -> None:
    """Prepare this process for `device`, before Megatron is imported. A second call changes nothing.

    Raises:
        UnsupportedVersion: the installed Megatron-Core or emerging-optimizers is outside the tested range.
    """
    check_versions()
    # Megatron asserts this for tensor parallelism on devices before Blackwell; harmless otherwise.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if device == "cpu":
        cpu.prepare()
    from megatron_async.mcore import patches  # imports torch

    patches.install(device)


def activate_or_exit(device: Device) -> None:
    """`activate`, for tools: with an untested version, end the process with its message and status 2."""
    try:
        activate(device)
    except UnsupportedVersion as unsupported:
        sys.stderr.write(f"{Path(sys.argv[0]).name}: {unsupported}\n")
        raise SystemExit(2) from None
