# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""What the host of a rank issues for its actions, in the program order of `pipeline/`.

torch puts a collective, a send or a receive behind all that was issued on the current stream before it.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from benchmarks.device.costs import Machine, Policy, StageTimes
from benchmarks.device.engine import COMPUTE, Device, Host, Meeting, Operation, Program, Simulation
from megatron_async.schedules.actions import Backward, BatchAction, Forward, Reduce, Schedule, Update
from megatron_async.schedules.dependencies import Key, key_of, previous_stage
from megatron_async.schedules.registry import SCHEDULES

SIDE, DATA_PARALLEL, GATHER = "side", "data parallel", "gather"
"""Streams besides compute, the links and the norms."""

_NORM_LAUNCHES = 10
"""Launches of the sum of squares; its time counts in that of the norm."""

Issue = Generator["float | Operation | None", None, Operation]


@dataclass(frozen=True, slots=True)
class Job:
    """A simulated run: data-parallel replicas of a pipeline.

    Attributes:
        times: of each rank, replica by replica.
        untaken_sends: messages of a link that are not waited for (see `ScheduleDefinition`).
        synchronize: rank and position of an F or B in which that rank synchronizes its device; None for nowhere.
    """

    simulation: Simulation
    schedule: Schedule
    times: Sequence[StageTimes]
    machine: Machine
    policy: Policy
    untaken_sends: int
    synchronize: tuple[int, int] | None = None

    @property
    def replicas(self) -> int:
        return len(self.times) // self.schedule.stages


class Parts:
    """The parts of an update, issued one after another.

    Args:
        parts: reduction, norm, and step.
        host_decides: whether the host reads the norm before the step.
    """

    def __init__(self, parts: Sequence[Callable[[], Issue]], *, host_decides: bool) -> None:
        self._parts = deque(parts)
        self._host_decides = host_decides
        self._last: Operation | None = None

    @property
    def previous(self) -> Operation:
        """The last part that was issued."""
        assert self._last is not None
        return self._last

    def issue(self, *, leave: int = 0) -> Program:
        """Issue all but some parts. The host waits before the step, if it decides whether to step."""
        while len(self._parts) > leave:
            if len(self._parts) == 1 and self._host_decides:
                yield self.previous
            self._last = yield from self._parts.popleft()()

    def poll(self, *, leave: int = 0) -> Generator["float | Operation | None", None, bool]:
        """Issue all but some parts, as long as the one before is complete; whether all of these are complete."""
        while len(self._parts) > leave and self.previous.done:
            self._last = yield from self._parts.popleft()()
        return self.previous.done


class RankProgram:
    """One rank: its device, and its host's program.

    Attributes:
        host: the host thread.
        position: the action that the host has come to.
        operations: first and last operation of each F and B, by position.
    """

    def __init__(self, job: Job, rank: int) -> None:
        self._replica, self._rank = divmod(rank, job.schedule.stages)
        self._job, self._policy, self._times = job, job.policy, job.times[rank]
        self._actions, machine = job.schedule.actions[self._rank], job.machine
        self._device = Device(
            job.simulation,
            one_queue=machine.one_queue,
            launch_cost=machine.launch,
            launch_limit=machine.launch_limit,
        )
        self.host = Host(self._device)
        self.position = 0
        self.operations: dict[int, tuple[Operation, Operation]] = {}
        self._waits: defaultdict[str, list[Operation]] = defaultdict(list)
        self._pieces: deque[Operation] = deque()
        self._parts: dict[BatchAction, Parts] = {}
        self._posted: defaultdict[str, deque[Operation]] = defaultdict(deque)
        self._received: defaultdict[str, int] = defaultdict(int)
        self._sends: defaultdict[str, deque[Operation]] = defaultdict(deque)
        sources = [(action.kind, previous_stage(job.schedule, self._rank, action)) for action in self._actions]
        self._expected = {
            kind: deque(key for other, key in sources if other == kind and key is not None and key[0] != self._rank)
            for kind in (Forward.kind, Backward.kind)
        }
        # What comes round a ring of stages is posted as the schedule says, the other messages one ahead.
        ends = {0: Forward.kind, job.schedule.stages - 1: Backward.kind}
        self._ring = ends.get(self._rank) if job.schedule.chunks > 1 else None
        self._ahead = self._policy.post_ahead and SCHEDULES[job.schedule.name].posts_ahead(job.schedule.stages)
        self.host.begin(self._run())

    def _run(self) -> Program:
        for kind in self._expected:
            yield from self._post_ahead(kind)
        for position, action in enumerate(self._actions):
            self.position = position
            yield from self._settle()
            match action:
                case Forward() | Backward():
                    yield from self._compute(action)
                case Reduce():
                    yield from self._reduce(action)
                case Update():
                    yield from self._update(action)
            # A host that waits for its device looks after the wait, before its next launch.
            if self._policy.ahead is None or not isinstance(action, Forward | Backward):
                yield from self._poll()

    # Streams

    def _burst(self, stream: str, category: str, duration: float = 0.0, launches: int = 1) -> Issue:
        operation = Operation(self._device, stream, category, duration, max(1, launches))
        yield from self.host.launch(operation, self._waits.pop(stream, ()))
        return operation

    def _communicate(self, stream: str, category: str, meeting: Meeting, current: str = COMPUTE) -> Issue:
        operation = Operation(self._device, stream, category, meeting=meeting)
        yield from self.host.launch(operation, self._issued(current))
        return operation

    def _issued(self, stream: str) -> list[Operation]:
        """What an event recorded now on a stream would wait for."""
        tail = self._device.tails.get(stream)
        return [*self._waits[stream], *([] if tail is None else [tail])]

    # Links

    def _post(self, kind: str) -> Program:
        message = self._message(self._expected[kind].popleft())
        self._posted[kind].append((yield from self._communicate(f"receive {kind}", "transfer", message)))

    def _post_ahead(self, kind: str) -> Program:
        if self._ahead and kind != self._ring and self._expected[kind]:
            yield from self._post(kind)

    def _post_due(self, receives: int) -> Program:
        if self._ring is not None:
            for _ in range(receives - self._received[self._ring] - len(self._posted[self._ring])):
                yield from self._post(self._ring)

    def _receive(self, kind: str) -> Program:
        if not self._posted[kind]:
            yield from self._post(kind)
        self._waits[COMPUTE].append(self._posted[kind].popleft())
        self._received[kind] += 1
        yield from self._post_ahead(kind)

    def _send(self, action: Forward | Backward) -> Program:
        message, sends = self._message(key_of(self._rank, action)), self._sends[action.kind]
        sends.append((yield from self._communicate(f"send {action.kind}", "transfer", message)))
        if len(sends) > self._job.untaken_sends:
            self._waits[COMPUTE].append(sends.popleft())

    def _message(self, source: Key) -> Meeting:
        return self._job.simulation.meeting((self._replica, source), 2, self._job.machine.transfer)

    def _sends_on(self, action: Forward | Backward) -> bool:
        schedule = self._job.schedule
        other = schedule.virtual_stage(self._rank, action.chunk) + (1 if isinstance(action, Forward) else -1)
        return 0 <= other < schedule.stages * schedule.chunks and schedule.place_of(other)[0] != self._rank

    # Actions

    def _compute(self, action: Forward | Backward) -> Program:
        yield from self._post_due(action.due)
        source = previous_stage(self._job.schedule, self._rank, action)
        if source is not None and source[0] != self._rank:
            yield from self._receive(action.kind)
        if self._job.synchronize == (self._rank, self.position):
            yield from self.host.synchronize()
        times, pieces = self._times, self._policy.pieces
        duration = times.forward if isinstance(action, Forward) else times.backward
        parts = pieces * self._job.schedule.chunks
        launches = self._job.machine.launches * duration / ((times.forward + times.backward) or 1.0)
        bursts = []
        for _ in range(pieces):
            yield from self._throttle()
            bursts.append((yield from self._burst(COMPUTE, action.kind, duration / parts, round(launches / parts))))
            self._pieces.append(bursts[-1])
        self.operations[self.position] = bursts[0], bursts[-1]
        if self._sends_on(action):
            yield from self._send(action)

    def _throttle(self) -> Program:
        """Between pieces of compute."""
        if self._policy.ahead is not None:
            while len(self._pieces) > self._policy.ahead:
                yield self._pieces.popleft()
        yield from self._poll()

    def _reduce(self, action: Reduce) -> Program:
        main = SIDE if self._policy.side else COMPUTE
        if self._policy.side:
            self._waits[SIDE] += self._issued(COMPUTE)

        def reduction() -> Issue:
            meeting = self._among_replicas(action, "reduction", self._times.reduction)
            return (yield from self._communicate(DATA_PARALLEL, "reduction", meeting, main))

        def norm() -> Issue:
            self._waits[main].append(parts.previous)
            yield from self._burst(main, "norm", launches=_NORM_LAUNCHES)
            across = self._job.schedule.reduction_across_ranks
            meeting = self._job.simulation.meeting(
                ("norm", action, None if across else self._rank),
                (self._job.schedule.stages if across else 1) * self._job.replicas,
                self._job.machine.norm,
            )
            return (yield from self._communicate(f"norm {action.chunk}", "norm", meeting, main))

        def step() -> Issue:
            self._waits[main].append(parts.previous)
            return (yield from self._step(action, main))

        parts = self._parts[action] = Parts([reduction, norm, step], host_decides=self._policy.launch != "once")
        yield from parts.issue(leave={"once": 0, "norm": 1}.get(self._policy.launch, 2))

    def _step(self, action: Reduce, stream: str) -> Issue:
        chunks, times = self._job.schedule.chunks, self._times
        launches = self._job.machine.step_launches // chunks
        step = yield from self._burst(stream, "step", times.step / chunks, launches)
        if not times.gather:
            return step
        gathers = GATHER if self._policy.own_gathers else DATA_PARALLEL
        meeting = self._among_replicas(action, "gather", times.gather)
        return (yield from self._communicate(gathers, "gather", meeting, stream))

    def _among_replicas(self, action: Reduce, kind: str, time: float) -> Meeting:
        """A collective of the same stage of all replicas."""
        key = kind, action, self._rank
        return self._job.simulation.meeting(key, self._job.replicas, time / self._job.schedule.chunks)

    def _update(self, action: Update) -> Program:
        parts = self._parts.pop(Reduce(action.chunk, action.batch))
        yield from parts.issue()
        self._waits[COMPUTE].append(parts.previous)

    def _poll(self) -> Program:
        for parts in self._parts.values():
            if not (yield from parts.poll(leave=1 if self._policy.launch == "update" else 0)):
                return

    def _settle(self) -> Program:
        """Before U, where the policy says so: wait for the norm and issue the step."""
        if not self._policy.settle:
            return
        for action in self._actions[self.position + self._policy.settle :][:1]:
            parts = self._parts.get(Reduce(action.chunk, action.batch)) if isinstance(action, Update) else None
            if parts is not None:
                yield from parts.issue()
