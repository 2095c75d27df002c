# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Requests to end a run early: signals and the time limit.

A request is only noted here. The training loop adds up every rank's notes with a batch's reductions, so that all
ranks stop after the same batch although one alone was asked, and nobody waits for an answer.
"""

import os
import signal
import time
from collections.abc import Iterable
from types import FrameType

FINISHED = 0
FAILED = 1
SAVED_ON_REQUEST = 85
"""Exit status of a run that was asked to end, has saved, and wants to go on; see examples/slurm."""
ENDED_UNSAVED = 128 + signal.SIGTERM
"""Exit status of a run that was asked to end and had no folder to save in."""

ALWAYS = (signal.SIGTERM, signal.SIGUSR1)
# A scheduler and a launcher may both pass the same request on; later than this it is a second one.
_ECHO_SECONDS = 2.0


class StopRequests:
    """Notes requests to end.

    The first signal asks the run to save and end; a second one ends this process at once, with status 128 + signal.

    Args:
        signals: signals to listen to, from the main thread.
        minutes: time limit of the run from now on; None for none.
    """

    def __init__(self, signals: Iterable[int] = (), minutes: float | None = None) -> None:
        self._process = os.getpid()
        self._deadline = None if minutes is None else time.monotonic() + 60.0 * minutes
        self._signaled: float | None = None
        for number in signals:
            self.listen(number)

    def listen(self, number: int) -> None:
        """Take this signal for a request, too."""
        signal.signal(number, self._note)

    def limit(self, minutes: float | None) -> None:
        """Set the time limit, in minutes from now; None leaves it as it is."""
        if minutes is not None:
            self._deadline = time.monotonic() + 60.0 * minutes

    @property
    def requested(self) -> bool:
        """Whether this rank has been asked to end."""
        return self._signaled is not None or (self._deadline is not None and time.monotonic() >= self._deadline)

    def ignore(self) -> None:
        """From now on the run is ending anyway: a launcher that stops its workers must not spoil the exit status."""
        for number in ALWAYS:
            signal.signal(number, signal.SIG_IGN)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            return  # a data loader's worker has inherited the handler; it ends when the run does
        if self._signaled is not None and time.monotonic() - self._signaled > _ECHO_SECONDS:
            os._exit(128 + number)
        if self._signaled is None:
            self._signaled = time.monotonic()
