# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Settings of a process that trains on GPUs, and the arguments that depend on optional packages."""

import argparse
import contextlib
import os
from pathlib import Path
from typing import Any

from megatron_async.platform.packages import APEX, TRANSFORMER_ENGINE, OptionalPackage
from megatron_async.schedules.arguments import schedule_of

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
MOST_QUEUES = 32
"""The largest value that CUDA takes, and more than a rank has streams; its default is 8."""
_FLIGHT_RECORDER_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def set_environment(*, one_queue: bool) -> None:
    """Set the variables that CUDA reads when it starts. What the user has set stays.

    Args:
        one_queue: whether all streams share one hardware queue, as Megatron demands for tensor parallelism before
            Blackwell. Delayed schedules need one for each stream, see `pipeline/rules.py`.
    """
    os.environ.setdefault(QUEUES, "1" if one_queue else str(MOST_QUEUES))
    # A kernel that is loaded at its first launch synchronizes the device, posted receives included.
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")


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

    Under a delayed schedule, tensor-parallel kernels of communication start before compute where both could: the
    purpose of one hardware queue, which Megatron reaches so from Blackwell on.
    """
    if schedule_of(args).delayed:
        args.high_priority_stream_groups = ["tp"]
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
