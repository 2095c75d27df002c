# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Process groups of gloo that share their network threads.

By itself, every group has a thread of its own that wakes up a hundred times a second. Megatron makes about twenty
groups, so sixteen ranks on one machine spend a fifth of two cores on threads that have nothing to do.
"""

import os
from datetime import timedelta
from functools import cache
from itertools import count
from typing import Any

_THREADS_PER_INTERFACE = 4
"""So many that a long sum in one group does not hold up the activations of another."""

_WORKERS_PER_INTERFACE = 2
"""As many threads for each group to run its collectives in as torch gives it."""


def sharing_threads(process_group: Any) -> Any:
    """A subclass of torch's `ProcessGroupGloo` whose groups take turns with a few sets of network threads."""
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
