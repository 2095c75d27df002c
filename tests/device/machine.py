# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""torch's streams, events and operations between processes, on the simulated devices of `benchmarks/device`.

Every rank is a thread. One of them runs at a time: it goes on until it launches or waits, and then gives way to the
simulation, which resumes it at the simulated time at which the call returns.
"""

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.device.costs import Machine
from benchmarks.device.engine import COMPUTE, Device, Host, Operation, Program, Simulation

LONGEST_SLEEP = 5000.0
"""ms after which a host that launches nothing is said to hang."""

_here = threading.local()


def rank_here() -> "Rank":
    """The rank whose thread this is."""
    rank: Rank = _here.rank
    return rank


class Rank:
    """A rank: its device, its host thread, and what the streams wait for.

    Args:
        number: of the rank.
        job: what its thread runs.
    """

    def __init__(self, simulation: Simulation, machine: Machine, number: int, job: Callable[[], None]) -> None:
        self.number, self.machine, self.simulation, self._job = number, machine, simulation, job
        self.stage: Any = None
        self.device = Device(
            simulation,
            one_queue=machine.one_queue,
            launch_cost=machine.launch,
            launch_limit=machine.launch_limit,
        )
        self.host = Host(self.device)
        self.current = COMPUTE
        self.waits: defaultdict[str, list[Operation]] = defaultdict(list)
        self.counts: defaultdict[str, int] = defaultdict(int)
        self.error: BaseException | None = None
        self._slept = 0.0
        self._request: Program | None = None
        self._to_thread, self._to_simulation = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.host.begin(self._program())

    def issued(self, stream: str) -> list[Operation]:
        """What an event recorded now on a stream waits for."""
        tail = self.device.tails.get(stream)
        return [*self.waits[stream], *([] if tail is None else [tail])]

    def burst(self, category: str, duration: float, launches: int) -> Operation:
        """Launch kernels on the current stream."""
        self._slept = 0.0
        operation = Operation(self.device, self.current, category, duration, max(1, launches))
        self._ask(self.host.launch(operation, self.waits.pop(self.current, ())))
        return operation

    def communicate(self, group: "Group", category: str, latency: float, size: int) -> Operation:
        """Launch an operation of a group, on the group's own stream behind the current one."""
        number = self.counts[group.name] = self.counts[group.name] + 1
        meeting = self.simulation.meeting((group.name, number), size, latency)
        self._slept = 0.0
        operation = Operation(self.device, group.name, category, meeting=meeting)
        self._ask(self.host.launch(operation, self.issued(self.current)))
        return operation

    def work(self, time: float) -> None:
        """The host is busy."""
        self._ask(iter([time]))  # type: ignore[arg-type]

    def sleep(self, time: float) -> None:
        """The host looks again later, but not for ever: what has not come after some seconds never comes."""
        self._slept += time
        self._ask(iter([time if self._slept < LONGEST_SLEEP else None]))  # type: ignore[arg-type]

    def wait_for(self, operations: list[Operation]) -> None:
        """The host waits."""
        self._ask(iter(operations))  # type: ignore[arg-type]

    def synchronize(self) -> None:
        """The host waits for everything on its device."""
        self._ask(self.host.synchronize())

    def _ask(self, request: Program) -> None:
        """In the thread: let the simulation carry out a request."""
        self._request = request
        self._to_simulation.release()
        self._to_thread.acquire()

    def _run(self) -> None:
        _here.rank = self
        self._to_thread.acquire()
        try:
            self._job()
        except BaseException as error:
            self.error = error
        self._request = None
        self._to_simulation.release()

    def _program(self) -> Program:
        self._thread.start()
        while True:
            self._to_thread.release()
            self._to_simulation.acquire()
            if self._request is None:
                return
            yield from self._request


@dataclass(frozen=True)
class Group:
    """A process group: the same on every rank that gives the same name.

    Attributes:
        members: ranks that take part in each operation.
        latency: time of an operation.
    """

    name: str
    members: int
    category: str
    latency: float

    def size(self) -> int:
        return 2  # of a group of one rank nothing would be launched


class Work:
    """A handle of an operation: waiting makes the current stream wait, not the host."""

    def __init__(self, operation: Operation) -> None:
        self._operation = operation

    def is_completed(self) -> bool:
        return self._operation.done

    def wait(self) -> bool:
        rank = rank_here()
        rank.waits[rank.current].append(self._operation)
        return True


def start(group: Group) -> Work:
    """Start an operation of a group."""
    return Work(rank_here().communicate(group, group.category, group.latency, group.members))


class Event:
    """As torch.cuda.Event."""

    def __init__(self, **_: Any) -> None:
        self._operations: list[Operation] = []

    def record(self, stream: "Stream | None" = None) -> None:
        rank = rank_here()
        self._operations = rank.issued(rank.current if stream is None else stream.name)

    def query(self) -> bool:
        return all(operation.done for operation in self._operations)

    def synchronize(self) -> None:
        rank_here().wait_for(list(self._operations))

    @property
    def operations(self) -> list[Operation]:
        return self._operations


class HostValues:
    """As `platform/host.py` on a GPU: a copy behind the current stream."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values, self._event = values.clone(), Event()
        self._event.record()

    @property
    def ready(self) -> bool:
        return self._event.query()

    def read(self) -> list[float]:
        self._event.synchronize()
        return [float(value) for value in self._values]


class Stream:
    """As torch.cuda.Stream."""

    def __init__(self, name: str | None = None, **_: Any) -> None:
        rank = rank_here()
        rank.counts["streams"] += name is None
        self.name = name or f"side {rank.counts['streams']}"

    def wait_stream(self, other: "Stream") -> None:
        rank = rank_here()
        rank.waits[self.name] += rank.issued(other.name)

    def wait_event(self, event: Event) -> None:
        rank_here().waits[self.name] += event.operations

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event


class Streams:
    """As the functions of torch.cuda."""

    Stream = Stream

    @staticmethod
    def current_stream() -> Stream:
        return Stream(rank_here().current)

    @staticmethod
    @contextlib.contextmanager
    def stream(stream: Stream) -> Iterator[None]:
        rank = rank_here()
        before, rank.current = rank.current, stream.name
        try:
            yield
        finally:
            rank.current = before
