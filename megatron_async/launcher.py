# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A process and its launcher. Standard library alone: used before the imports that take seconds."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def is_first_rank() -> bool:
    """Whether this process speaks for the job: rank 0, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def end_with_launcher() -> None:
    """Have the kernel kill this process when its parent dies, if the parent is torchrun; Linux alone (prctl(2)).

    A launcher that is killed cannot end its workers. They would wait in the rendezvous or train on, beside the run that
    takes their place. Nothing saved is lost: a checkpoint is published when it is complete.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), signal.SIGKILL)
