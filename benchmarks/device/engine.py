# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Hosts and devices in simulated time.

- A host issues operations in program order. A launch costs host time. The host stops while more launches than a limit
  wait in a hardware queue.
- An operation starts when it is issued, the one before it on its stream has ended, and all that it waits for has ended.
  On a shared hardware queue, all operations issued before it must have left the queue as well: a burst of kernels
  leaves at its end, a kernel of communication when it has come to its turn.
- The operations of a meeting (a collective, or a message) run together from the arrival of the last one.
- Bursts on the compute stream and on other streams share the device. The others have priority: the compute stream
  stops for their time.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Generator, Hashable, Iterable
from dataclasses import dataclass, field
from itertools import count

COMPUTE = "compute"
"""The stream that gives way to bursts on other streams."""


class Span:
    """Work of a host or a device.

    Attributes:
        category: what the time is spent on.
        cause: what it waited for last; None at the beginning.
        start, end: times; the end of a running operation may still move.
    """

    __slots__ = ("category", "cause", "end", "start")

    def __init__(self, category: str, cause: "Span | None" = None, start: float = 0.0, end: float = 0.0) -> None:
        self.category, self.cause, self.start, self.end = category, cause, start, end


class Operation(Span):
    """A burst of kernels, or with a meeting one kernel of communication.

    Attributes:
        stolen: part of its time that bursts of other streams took.
        starved: part of its time in which the device waited for launches.
        queued: whether it waited last for the hardware queue.
        left: whether it has left the hardware queue.
        followers: wait for its end.
        watchers: wait until it leaves its queue; a host also waits here for its start.
    """

    __slots__ = (
        "device",
        "done",
        "duration",
        "first_launch",
        "followers",
        "issued",
        "launches",
        "left",
        "meeting",
        "missing",
        "queued",
        "starved",
        "stolen",
        "stream",
        "watchers",
    )

    def __init__(
        self,
        device: "Device",
        stream: str,
        category: str,
        duration: float = 0.0,
        launches: int = 1,
        meeting: "Meeting | None" = None,
    ) -> None:
        super().__init__(category)
        self.device, self.stream, self.duration, self.launches = device, stream, duration, launches
        self.meeting = meeting
        self.left = self.done = self.queued = False
        self.stolen = self.starved = self.issued = 0.0
        self.missing, self.first_launch = 1, 0
        self.followers: list[Operation | Host] = []
        self.watchers: list[Operation | Host] = []


@dataclass(slots=True)
class Meeting:
    """Operations that run together, and the time from the arrival of the last of `size` members to the end."""

    size: int
    latency: float
    members: list[Operation] = field(default_factory=list)


Program = Generator["float | Operation | None", None, None]
"""A host yields the time of its own work, an operation whose end it waits for, or None where something will wake it."""


class Simulation:
    """The clock, and the meetings between devices."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Operation | Host]] = []
        self._numbers = count()
        self._meetings: dict[Hashable, Meeting] = {}

    def meeting(self, key: Hashable, size: int, latency: float) -> Meeting:
        """The meeting with this key, the same for all members."""
        found = self._meetings.get(key)
        if found is None:
            found = self._meetings[key] = Meeting(size, latency)
        return found

    def at(self, time: float, what: "Operation | Host") -> None:
        """End an operation, or resume a host."""
        heapq.heappush(self._events, (time, next(self._numbers), what))

    def run(self) -> None:
        """Run until nothing can go on."""
        while self._events:
            self.now, _, what = heapq.heappop(self._events)
            if isinstance(what, Host):
                what.resume()
            elif what.end > self.now:
                self.at(what.end, what)
            else:
                what.device.finish(what)


class Queue:
    """A hardware queue: operations in the order of their launches."""

    def __init__(self) -> None:
        self.waiting: deque[Operation] = deque()
        self._launches = 0

    def add(self, operation: Operation) -> None:
        operation.first_launch = self._launches
        self._launches += operation.launches
        self.waiting.append(operation)

    def blocking(self, limit: int) -> tuple[Operation, float] | None:
        """The operation that must get on before another launch, and the share of it that must be done."""
        while self.waiting and self.waiting[0].left:
            self.waiting.popleft()
        if not self.waiting:
            return None
        first = self.waiting[0]
        excess = self._launches - limit - first.first_launch
        return (first, min(1.0, excess / first.launches)) if excess > 0 else None


class Device:
    """Streams and hardware queues of one rank.

    Attributes:
        tails: the last operation of each stream.
    """

    def __init__(
        self, simulation: Simulation, *, one_queue: bool, launch_cost: float, launch_limit: int | None
    ) -> None:
        self.simulation, self.one_queue = simulation, one_queue
        self.launch_cost, self.launch_limit = launch_cost, launch_limit
        self.tails: dict[str, Operation] = {}
        self._queues: defaultdict[str, Queue] = defaultdict(Queue)
        self._computing: Operation | None = None
        self._busy_until = 0.0

    def queue(self, stream: str) -> Queue:
        return self._queues["" if self.one_queue else stream]

    def issue(self, operation: Operation, after: Iterable[Operation], cause: Span | None) -> None:
        """Put an operation into its stream; it waits for all of `after`."""
        queue = self.queue(operation.stream)
        waits = set(after)
        if (tail := self.tails.get(operation.stream)) is not None:
            waits.add(tail)
        for other in waits:
            if not other.done:
                other.followers.append(operation)
                operation.missing += 1
        if self.one_queue and queue.waiting and not (last := queue.waiting[-1]).left:
            last.watchers.append(operation)
            operation.missing += 1
        self.tails[operation.stream] = operation
        operation.issued = self.simulation.now
        queue.add(operation)
        self.ready(operation, cause)

    def ready(self, operation: Operation, cause: Span | None, *, queued: bool = False) -> None:
        """One of the things that an operation waits for is there."""
        operation.missing -= 1
        if operation.missing:
            return
        operation.cause, operation.queued = cause, queued
        if (meeting := operation.meeting) is None:
            self._start(operation)
            return
        self._leave(operation)
        meeting.members.append(operation)
        if len(meeting.members) == meeting.size:
            now = self.simulation.now
            for member in meeting.members:
                member.start, member.end = now, now + meeting.latency
                member.cause, member.queued = cause, queued
                self.simulation.at(member.end, member)

    def _start(self, operation: Operation) -> None:
        now = operation.start = self.simulation.now
        if operation.stream == COMPUTE:
            kernel = operation.duration / operation.launches
            launched = operation.issued + operation.launches * self.launch_cost + kernel
            operation.starved = max(0.0, launched - now - operation.duration)
            operation.stolen = max(0.0, self._busy_until - now)
            operation.end = now + operation.duration + operation.starved + operation.stolen
            self._computing = operation
        else:
            operation.end = self._busy_until = max(now, self._busy_until) + operation.duration
            if self._computing is not None:
                self._computing.end += operation.duration
                self._computing.stolen += operation.duration
        self.simulation.at(operation.end, operation)
        for watcher in [other for other in operation.watchers if isinstance(other, Host)]:
            operation.watchers.remove(watcher)
            watcher.wake(operation)

    def finish(self, operation: Operation) -> None:
        operation.done = True
        if operation is self._computing:
            self._computing = None
        self._leave(operation)
        for other in operation.followers:
            if isinstance(other, Host):
                other.wake(operation)
            else:
                other.device.ready(other, operation)
        operation.followers.clear()

    def _leave(self, operation: Operation) -> None:
        if operation.left:
            return
        operation.left = True
        # What stands behind a kernel of communication waited for what that kernel waited for.
        cause = operation if operation.meeting is None else operation.cause
        for other in operation.watchers:
            if isinstance(other, Host):
                other.wake(cause)
            else:
                self.ready(other, cause, queued=True)
        operation.watchers.clear()


class Host:
    """A host thread: issues the operations of one rank.

    Attributes:
        cause: what it did or waited for last.
        finished: whether its program has ended.
    """

    def __init__(self, device: Device) -> None:
        self._device, self._simulation = device, device.simulation
        self.cause: Span | None = None
        self.finished = False
        self._program: Program | None = None
        self._work: Span | None = None

    def begin(self, program: Program) -> None:
        self._program = program
        self._simulation.at(0.0, self)

    def wake(self, cause: Span | None) -> None:
        """What the host waited for is there."""
        self.cause = cause
        self._simulation.at(self._simulation.now, self)

    def resume(self) -> None:
        """Run the program until it waits."""
        assert self._program is not None
        if self._work is not None:
            self.cause, self._work = self._work, None
        for command in self._program:
            if isinstance(command, Operation):
                if command.done:
                    continue
                command.followers.append(self)
            elif command is not None:
                if command == 0:
                    continue
                end = self._simulation.now + command
                self._work = Span("launch", self.cause, self._simulation.now, end)
                self._simulation.at(end, self)
            return
        self.finished = True

    def launch(self, operation: Operation, after: Iterable[Operation] = ()) -> Program:
        """Issue an operation. Takes the time of its launches, and longer where its queue is full."""
        device = self._device
        device.issue(operation, after, self.cause)
        yield operation.launches * device.launch_cost
        if device.launch_limit is None:
            return
        while (found := device.queue(operation.stream).blocking(device.launch_limit)) is not None:
            first, share = found
            if first.missing:
                first.watchers.append(self)
                yield None
                continue
            moment = first.start + share * (first.end - first.start)
            if moment <= self._simulation.now:
                return
            self._simulation.at(moment, self)
            yield None
            self.cause = first

    def synchronize(self) -> Program:
        """Wait for everything that was issued: a synchronization of the device."""
        yield from list(self._device.tails.values())
