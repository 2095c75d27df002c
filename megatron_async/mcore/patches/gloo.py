# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Gloo process groups that share their network threads.

Each gloo group has a thread that wakes up a hundred times a second. Megatron makes about twenty groups, so the idle
threads of sixteen ranks on one machine take a fifth of two cores.
"""

import os
from datetime import timedelta
from functools import cache
from itertools import count
from typing import Any

_THREADS_PER_INTERFACE = 4
"""Enough that a long reduction in one group does not delay the activations of another."""

_WORKERS_PER_INTERFACE = 2
"""Threads of a group that run its collectives, as in torch."""


def sharing_threads(process_group: Any) -> Any:
    """A subclass of torch's `ProcessGroupGloo`. Its groups are assigned to a few sets of network threads in turn."""
    turns = count()

    @cache
    def devices(turn: int) -> list[Any]:
        interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        if not interfaces:
            return [process_group.create_default_device()]
        return [process_group.create_device(interface=name) for name in interfaces]

    class ProcessGroupGloo(process_group):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = process_group._Options()
            options._devices = devices(next(turns) % _THREADS_PER_INTERFACE)
            options._threads = _WORKERS_PER_INTERFACE * len(options._devices)
            options._timeout = timeout
            super().__init__(store, rank, size, options)

    return ProcessGroupGloo
