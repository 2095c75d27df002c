# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Settings of a process that trains on GPUs, and the arguments that depend on optional packages."""

import argparse
import contextlib
import os
from pathlib import Path
from typing import Any

from megatron_async.platform.packages import APEX, TRANSFORMER_ENGINE, OptionalPackage

_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_MOST_QUEUES = 32
"""The largest value that CUDA takes, and more than a rank has streams; its default is 8."""
_FLIGHT_RECORDER_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def set_environment(tensor_parallel: bool) -> None:
    """Set the variables that CUDA reads when it starts. What the user has set stays.

    Args:
        tensor_parallel: before Blackwell, Megatron demands one hardware queue for tensor parallelism. Without it the
            update and the links get as many as CUDA has: in one queue, a kernel that waits holds up all that were
            launched later, and streams that outnumber the queues share them.
    """
    os.environ.setdefault(_QUEUES, "1" if tensor_parallel else str(_MOST_QUEUES))
    # A kernel that is loaded at its first launch synchronizes the device, posted receives included.
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")


def runs_streams_beside_each_other() -> bool:
    """Whether a stream that waits never holds up another one: there is a hardware queue for each."""
    import torch

    return torch.cuda.is_available() and int(os.environ.get(_QUEUES, "8")) >= _MOST_QUEUES


# Arguments of --transformer-impl local without a package: (package, argparse destination, value).
_LOCAL_WITHOUT: tuple[tuple[OptionalPackage, str, Any], ...] = (
    (APEX, "gradient_accumulation_fusion", False),
    (APEX, "masked_softmax_fusion", False),
    (APEX, "persist_layer_norm", False),
    (APEX, "no_persist_layer_norm", True),
    (TRANSFORMER_ENGINE, "apply_rope_fusion", False),
)


def adjust(args: argparse.Namespace) -> None:
    """Switch fused kernels off whose package is missing; `packages.messages` says so at the start of the run.

    Transformer Engine's layers have kernels of their own. A patch switches the fusion of Megatron's LM head off.
    """
    if args.transformer_impl == "local":
        vars(args).update({name: value for package, name, value in _LOCAL_WITHOUT if not package.usable})


def record_flights(args: argparse.Namespace) -> None:
    """Let torch's flight recorder write to the run's folder when an operation of NCCL times out.

    Megatron sets the recorder's variables from its arguments when the path is given; it keeps those that are set. The
    folder is that of `--save`, else that of the metrics file, else runs/.
    """
    given = args.flight_recorder_dump_path or any(name in os.environ for name in _FLIGHT_RECORDER_FILES)
    if given:
        return
    beside = args.save or (Path(args.metrics_file).parent if args.metrics_file else "runs")
    folder = Path(beside) / "flight_recorder"
    with contextlib.suppress(OSError):  # torch's own place is left, below the home folder
        folder.mkdir(parents=True, exist_ok=True)  # torch does not make it
        args.flight_recorder_dump_path = str(folder)
