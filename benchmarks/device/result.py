# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Runs the simulated hosts and devices, and finds where the time of a batch goes."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.device.costs import Machine, Policy, StageTimes
from benchmarks.device.engine import COMPUTE, Operation, Simulation, Span
from benchmarks.device.program import Job, RankProgram
from megatron_async.schedules.actions import Action, Backward, Forward, Schedule
from megatron_async.schedules.registry import SCHEDULES

SKIPPED_BATCHES = 3
"""Batches before the steady state: the pipe fills, and the first update comes before the third one."""

LEAST_BATCHES = SKIPPED_BATCHES + 3
"""For a batch time. The critical path is followed from the last batch, and counted before it."""


@dataclass(frozen=True, slots=True)
class DeviceResult:
    """Result of `simulate_device`. Times in ms.

    Attributes:
        hung: the action in which the host of each rank waits forever; empty for a run that ends.
        spans: for each rank, (start, end) of each F and B on its device, by position in the table.
        limit: compute alone: forwards, backwards and optimizer steps of a batch on the slowest stage.
        batch_time: of the slowest rank in steady state; None for runs that hang or have fewer than `LEAST_BATCHES`.
        added: batch_time - limit by cause, from the critical path. `compute` is F and B: above 0 where the pipeline
            drains, below where the path runs beside compute. `queue` is communication that held up compute through the
            hardware queue. `launch` is the host's work, and a device that waits for it.
    """

    hung: dict[int, Action]
    spans: tuple[dict[int, tuple[float, float]], ...]
    limit: float
    batch_time: float | None
    added: dict[str, float]


def simulate_device(
    schedule: Schedule,
    times: StageTimes | Sequence[StageTimes],
    machine: Machine,
    policy: Policy,
    *,
    synchronize: tuple[int, int] | None = None,
) -> DeviceResult:
    """Run a table on simulated hosts and devices.

    Args:
        schedule: a valid table.
        times: one for each rank, or one for all ranks. Several for each stage, pipeline by pipeline, are data-parallel
            replicas: they meet in reductions, norms and gathers.
        synchronize: rank and position of an F or B in which that rank synchronizes its device, as the compilation of a
            kernel does.

    Raises:
        ValueError: wrong number of times.
    """
    every = [times] * schedule.stages if isinstance(times, StageTimes) else list(times)
    if not every or len(every) % schedule.stages:
        raise ValueError(f"times of {len(every)} ranks for {schedule.stages} stages: give one for each, or a multiple")
    simulation = Simulation()
    untaken_sends = SCHEDULES[schedule.name].untaken_sends(schedule.stages)
    job = Job(simulation, schedule, every, machine, policy, untaken_sends, synchronize)
    ranks = [RankProgram(job, rank) for rank in range(len(every))]
    simulation.run()
    hung = {
        number: schedule.actions[number % schedule.stages][rank.position]
        for number, rank in enumerate(ranks)
        if not rank.host.finished
    }
    spans = tuple(
        {position: (first.start, last.end) for position, (first, last) in rank.operations.items()} for rank in ranks
    )
    compute, steps = max((_own_compute(schedule, own) for own in every), key=sum)
    result = DeviceResult(hung, spans, compute + steps, None, {})
    if hung or schedule.batches < LEAST_BATCHES:
        return result
    windows = [_window(schedule, number % schedule.stages, rank) for number, rank in enumerate(ranks)]
    opening, closing = max(windows, key=lambda window: window[1].start - window[0].start)
    batches = schedule.batches - 1 - SKIPPED_BATCHES
    batch_time = (closing.start - opening.start) / batches
    path = _critical_path(closing, opening.start, closing.start - batch_time)
    added = {"compute": -compute, "step": -steps}
    for cause, time in path.items():
        added[cause] = added.get(cause, 0.0) + time / (batches - 1)
    return replace(result, batch_time=batch_time, added=added)


def _own_compute(schedule: Schedule, times: StageTimes) -> tuple[float, float]:
    """Forwards and backwards of a batch, and its optimizer steps."""
    steps = schedule.microbatches / schedule.microbatches_per_update
    return schedule.microbatches * (times.forward + times.backward), steps * times.step


def _window(schedule: Schedule, number: int, rank: RankProgram) -> tuple[Operation, Operation]:
    """The first forwards of two batches: the first one in steady state, and the last one."""
    first, size = schedule.first_batch, schedule.microbatches
    wanted = [(first + SKIPPED_BATCHES) * size, (first + schedule.batches - 1) * size]
    found = {
        action.microbatch: rank.operations[position][0]
        for position, action in enumerate(schedule.actions[number])
        if isinstance(action, Forward) and action.chunk == schedule.chunks - 1 and action.microbatch in wanted
    }
    return found[wanted[0]], found[wanted[1]]


def _critical_path(last: Operation, opening: float, closing: float) -> dict[str, float]:
    """Time by cause between two times, on the path that leads to the start of an operation."""
    causes: defaultdict[str, float] = defaultdict(float)
    queued, end, span = last.queued, last.start, last.cause
    while span is not None and end > opening:
        on_compute = isinstance(span, Operation) and span.stream == COMPUTE
        for category, length in reversed(_parts_of(span, end, queued and not on_compute)):
            causes[category] += max(0.0, min(end, closing) - max(end - length, opening))
            end -= length
        end = min(end, span.start)
        queued = isinstance(span, Operation) and (span.queued or (queued and not on_compute))
        span = span.cause
    return causes


def _parts_of(span: Span, end: float, queued: bool) -> list[tuple[str, float]]:
    """Categories and lengths of a span up to a time, in order."""
    length = max(0.0, end - span.start)
    if not isinstance(span, Operation) or span.stream != COMPUTE:
        waited = queued and isinstance(span, Operation) and span.meeting is not None
        return [("queue" if waited else span.category, length)]
    own = "compute" if span.category in (Forward.kind, Backward.kind) else span.category
    if end < span.end:
        return [(own, length)]
    return [("step", span.stolen), ("launch", span.starved), (own, length - span.stolen - span.starved)]
