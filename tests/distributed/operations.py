# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Jobs that watch or delay every operation between processes, whichever function of torch starts it."""

import contextlib
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from tests.distributed.jobs import BASE, Outcome, train

METHODS = (
    "allreduce broadcast allgather all_gather_single allgather_coalesced reduce reduce_scatter reduce_scatter_single "
    "alltoall alltoall_base all_to_all_single gather scatter barrier send recv"
).split()

Start = Callable[[Any, str, Sequence[Any], Callable[[], Any]], Any]
"""Group, method, arguments, the operation itself -> its handle."""


@contextlib.contextmanager
def watched(start: Start) -> Iterator[None]:
    """Inside, `start` stands between torch and its process groups."""
    import torch.distributed as dist

    def method(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: Any, *args: Any, **options: Any) -> Any:
            return start(group, name, args, lambda: original(group, *args, **options))

        return call

    methods = {name: method(name, getattr(dist.ProcessGroup, name)) for name in METHODS}
    with mock.patch.multiple(dist.ProcessGroup, **methods):
        yield


@dataclass
class Operations:
    """What a rank started while it trained.

    Attributes:
        groups: members of each group, by its name.
        started: (kind, elements, type) of each operation in a group of several ranks, in order.
        polled: groups of operations that were started at moments which differ between ranks.
        scheduled: groups of operations at places of the schedule.
    """

    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    started: dict[str, list[tuple[str, int, str]]] = field(default_factory=lambda: defaultdict(list))
    polled: set[str] = field(default_factory=set)
    scheduled: set[str] = field(default_factory=set)


def operations(arguments: Sequence[str], sleep_ms: float) -> Operations:
    """Train with stalling stages; note the operations of each group."""
    import torch
    import torch.distributed as dist

    from megatron_async.config import arguments as command_line
    from megatron_async.pipeline.update import DeferredUpdate
    from megatron_async.training import run
    from tests.distributed.jobs import staller

    found, polling = Operations(), False

    def first_tensor(values: Any) -> torch.Tensor:
        return values if isinstance(values, torch.Tensor) else first_tensor(values[0])

    def start(group: Any, name: str, args: Sequence[Any], operation: Callable[[], Any]) -> Any:
        if group.size() > 1 and name != "barrier":
            kind = "message" if name in ("send", "recv") else name
            tensor = first_tensor(args[1] if kind == "allgather" else args[0])
            size = (
                0 if name.startswith(("alltoall", "all_to_all")) else tensor.numel()
            )  # tokens of experts: uneven parts
            found.groups[group.group_name] = tuple(dist.get_process_group_ranks(group))
            found.started[group.group_name].append((kind, size, str(tensor.dtype)))
            (found.polled if polling else found.scheduled).add(group.group_name)
        return operation()

    def within(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal polling
            before, polling = polling, True
            try:
                return method(*args)
            finally:
                polling = before

        return call

    methods = {name: within(getattr(DeferredUpdate, name)) for name in ("poll", "wait", "apply")}
    loop = run.build(command_line.parse([*BASE, *arguments]), callbacks=[staller(sleep_ms)])
    with mock.patch.multiple(DeferredUpdate, **methods), watched(start):
        loop.run()
    run.close()
    found.started = dict(found.started)
    return found


class Late:
    """A handle that does not admit its completion before it is waited for, each time with a probability."""

    def __init__(self, work: Any, probability: float, generator: random.Random) -> None:
        self._work, self._probability, self._generator = work, probability, generator

    def is_completed(self) -> bool:
        return self._generator.random() >= self._probability and bool(self._work.is_completed())

    def wait(self, *timeout: Any) -> bool:
        return bool(self._work.wait(*timeout))


def train_with_late_works(arguments: Sequence[str], probability: float) -> Outcome:
    """Train where handles are late, at moments that differ between ranks."""
    generator = random.Random()

    def start(group: Any, name: str, args: Sequence[Any], operation: Callable[[], Any]) -> Any:
        return Late(operation(), probability, generator)

    with watched(start):
        return train(arguments)
