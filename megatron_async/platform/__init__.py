# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Where a run computes: on CUDA devices as Megatron-Core expects, or on CPUs over gloo.

Everything outside this package is device-neutral. `activate` must run before any Megatron module is imported.
"""

import os
from typing import Literal

Device = Literal["cpu", "cuda"]
DEVICE_CHOICES = ("auto", "cuda", "cpu")


def choose(requested: str) -> tuple[Device, str]:
    """Resolve `--device` to a device and a sentence that says why.

    Raises:
        ValueError: for `cuda` on a machine where torch finds no usable GPU.
    """
    import torch

    available = torch.cuda.is_available()
    if requested == "cpu":
        return "cpu", "device: cpu (as asked), processes talk over gloo"
    if requested == "cuda" and not available:
        raise ValueError(
            "--device cuda, but torch finds no usable CUDA device here. Use --device cpu, or check the driver "
            "(torch.cuda.is_available() must be True)."
        )
    if available:
        return "cuda", f"device: cuda ({torch.cuda.get_device_name(0)}), processes talk over nccl"
    return "cpu", "device: cpu, because torch finds no CUDA device; processes talk over gloo"


def activate(device: Device) -> None:
    """Prepare this process for `device`. A second call with the same device changes nothing.

    On CUDA only environment defaults that Megatron asserts are set. On CPU, Megatron-Core is adapted by the
    patches listed in `megatron_async.platform.cpu`.
    """
    # Megatron asserts this for tensor parallelism on devices before Blackwell; harmless otherwise.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if device == "cpu":
        from megatron_async.platform import cpu

        cpu.install()
