# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Requests to end a run early: signals and the time limit.

The training loop sums the requests of all ranks with the reductions of a batch, so all ranks stop after the same batch.
"""

import os
import signal
import time
from collections.abc import Iterable
from types import FrameType

FINISHED = 0
FAILED = 1
SAVED_ON_REQUEST = 85
"""Exit status after a requested stop with a checkpoint; the job can be resubmitted, see examples/slurm."""
ENDED_UNSAVED = 128 + signal.SIGTERM
"""Exit status after a requested stop without `--save`."""

ALWAYS = (signal.SIGTERM, signal.SIGUSR1)
# Scheduler and launcher may both forward one request; a signal later than this is a second request.
_ECHO_SECONDS = 2.0


class StopRequests:
    """Records requests to end.

    The first signal requests a save and a stop. A second signal ends this process at once with status 128 + signal.

    Args:
        signals: signals to handle; needs the main thread.
        minutes: time limit from now, or None.
    """

    def __init__(self, signals: Iterable[int] = (), minutes: float | None = None) -> None:
        self._process = os.getpid()
        self._deadline: float | None = None
        self._signaled: float | None = None
        self._signals: set[int] = set()
        self.limit(minutes)
        for number in signals:
            self.listen(number)

    def listen(self, number: int) -> None:
        """Handle this signal as a request."""
        signal.signal(number, self._note)
        self._signals.add(number)

    def limit(self, minutes: float | None) -> None:
        """Set the time limit in minutes from now; None keeps it."""
        if minutes is not None:
            self._deadline = time.monotonic() + 60.0 * minutes

    @property
    def requested(self) -> bool:
        """Whether this rank has received a request."""
        return self._signaled is not None or (self._deadline is not None and time.monotonic() >= self._deadline)

    def ignore(self) -> None:
        """Ignore the signals while the run ends, so that nobody can change the exit status."""
        for number in self._signals:
            signal.signal(number, signal.SIG_IGN)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            return  # a data loader's worker inherits the handler
        if self._signaled is not None and time.monotonic() - self._signaled > _ECHO_SECONDS:
            os._exit(128 + number)
        if self._signaled is None:
            self._signaled = time.monotonic()
