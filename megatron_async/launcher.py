# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A process and its launcher end together. Standard library alone: used before the imports that take seconds."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

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


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Let SIGTERM raise SystemExit in a block or function of the main thread, as an interrupt from the keyboard raises
    KeyboardInterrupt, so that the processes that it started end too."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def end(processes: Sequence[subprocess.Popen[bytes]], grace: float) -> None:
    """Send SIGTERM to processes that still run, and SIGKILL to one that takes longer to end than `grace` seconds."""
    for process in processes:
        process.send_signal(signal.SIGTERM)
    for process in processes:
        try:
            process.wait(grace)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
