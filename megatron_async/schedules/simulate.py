# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Timing of a table: when each action runs, how much of the time ranks compute, what they hold."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_async.schedules.actions import Action, Backward, Forward, Reduce, Schedule, Update
from megatron_async.schedules.dependencies import Key, execute, key_of, predecessors
from megatron_async.schedules.versions import peak_versions


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Times of one rank with all its chunks, in any unit; a chunk takes its equal share.

    Attributes:
        forward: forward of one micro-batch through the rank's layers.
        backward: backward of one micro-batch through them, recomputation included.
        update: optimizer step of all their weights.
    """

    forward: float
    backward: float
    update: float = 0.0


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """What the simulation of a table found; times in the unit of the costs, from the first action on.

    Busy time is time in F, B and U; a reduction runs beside them. The *steady window* of a rank opens at its
    first forward of batch first_batch + w on its last chunk and closes at that of batch
    first_batch + batches - w, with w a quarter of the batches, rounded down, but at least one batch and at
    least P micro-batches. So it holds whole batches and neither the filling nor the draining of the pipe.
    With fewer than 2w + 1 batches there is no such window and the steady shares are the total ones.

    Attributes:
        makespan: end of the last action.
        spans: (start, end) of each action, indexed like the table.
        busy: busy time of each rank.
        busy_share: busy time over makespan, for each rank.
        bubble_share: 1 - sum of busy time / (P * makespan): filling and draining included.
        steady_busy_share: busy time inside the steady window over the length of the window, for each rank.
        steady_bubble_share: 1 - sum of busy time inside the steady windows / sum of their lengths.
        live_activations: most micro-batches whose activations a rank holds, in units of one micro-batch
            through all layers of the rank: a chunk counts 1 / chunks.
        weight_versions: most weight versions alive at once, for each rank and chunk.
    """

    makespan: float
    spans: tuple[tuple[tuple[float, float], ...], ...]
    busy: tuple[float, ...]
    busy_share: tuple[float, ...]
    bubble_share: float
    steady_busy_share: tuple[float, ...]
    steady_bubble_share: float
    live_activations: tuple[float, ...]
    weight_versions: tuple[tuple[int, ...], ...]


def simulate(
    schedule: Schedule,
    costs: StageCosts | Sequence[StageCosts],
    *,
    transfer: float = 0.0,
    reduction: float = 0.0,
) -> SimulationResult:
    """Run a table in time.

    Every rank runs its list in order, each action as soon as it can. An activation or gradient is at the
    neighbor `transfer` after the action that made it, while both ranks compute on. An update waits until the
    reductions of its batch have started on all ranks (on its own, if the schedule reduces per rank) and
    `reduction` more.

    Args:
        schedule: a valid table.
        costs: of every rank, or one for all.
        transfer: time of one activation or gradient between two ranks.
        reduction: time of the reductions of one batch.

    Raises:
        ValueError: negative times, a wrong number of costs, or a table that deadlocks.
    """
    rank_costs = [costs] * schedule.stages if isinstance(costs, StageCosts) else list(costs)
    _check_times(schedule, rank_costs, transfer, reduction)
    spans = _run(schedule, rank_costs, transfer, reduction)
    makespan = max(end for row in spans for _, end in row)
    windows = [_steady_window(schedule, rank, spans[rank]) or (0.0, makespan) for rank in range(schedule.stages)]
    busy = [_busy_time(row, 0.0, makespan) for row in spans]
    steady = [_busy_time(row, *window) for row, window in zip(spans, windows, strict=True)]
    lengths = [end - start for start, end in windows]
    return SimulationResult(
        makespan=makespan,
        spans=spans,
        busy=tuple(busy),
        busy_share=tuple(_share(time, makespan) for time in busy),
        bubble_share=_idle_share(sum(busy), schedule.stages * makespan),
        steady_busy_share=tuple(_share(*pair) for pair in zip(steady, lengths, strict=True)),
        steady_bubble_share=_idle_share(sum(steady), sum(lengths)),
        live_activations=tuple(_peak_activations(row, schedule.chunks) for row in schedule.actions),
        weight_versions=tuple(
            tuple(peak_versions(schedule, rank, chunk) for chunk in range(schedule.chunks))
            for rank in range(schedule.stages)
        ),
    )


def _check_times(schedule: Schedule, costs: Sequence[StageCosts], transfer: float, reduction: float) -> None:
    problems = []
    if len(costs) != schedule.stages:
        problems.append(f"costs of {len(costs)} ranks for {schedule.stages} stages: give one for each")
    times = [transfer, reduction] + [time for c in costs for time in (c.forward, c.backward, c.update)]
    if min(times) < 0:
        problems.append(f"time {min(times)}: must not be negative")
    if problems:
        raise ValueError("; ".join(problems))


def _run(
    schedule: Schedule, costs: Sequence[StageCosts], transfer: float, reduction: float
) -> tuple[tuple[tuple[float, float], ...], ...]:
    execution = execute(schedule)
    if execution.blocked:
        raise ValueError(f"schedule {schedule.name} deadlocks on ranks {sorted(execution.blocked)}; validate it first")
    ends: dict[Key, float] = {}
    clocks = [0.0] * schedule.stages
    spans: list[list[tuple[float, float]]] = [[] for _ in range(schedule.stages)]
    for rank, step in execution.order:
        action = schedule.actions[rank][step]
        start = clocks[rank]
        for key in predecessors(schedule, rank, action):
            latency = reduction if isinstance(action, Update) else transfer if key[0] != rank else 0.0
            start = max(start, ends[key] + latency)
        end = start + _duration(action, costs[rank], schedule.chunks)
        ends[key_of(rank, action)] = clocks[rank] = end
        spans[rank].append((start, end))
    return tuple(tuple(row) for row in spans)


def _duration(action: Action, costs: StageCosts, chunks: int) -> float:
    match action:
        case Forward():
            return costs.forward / chunks
        case Backward():
            return costs.backward / chunks
        case Update():
            return costs.update / chunks
        case Reduce():
            return 0.0


def _steady_window(schedule: Schedule, rank: int, spans: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    margin = max(-(-schedule.stages // schedule.microbatches), schedule.batches // 4)
    if schedule.batches < 2 * margin + 1:
        return None
    numbers = schedule.microbatch_range
    opening = numbers.start + margin * schedule.microbatches
    closing = numbers.stop - margin * schedule.microbatches
    starts = {
        action.microbatch: start
        for action, (start, _) in zip(schedule.actions[rank], spans, strict=True)
        if isinstance(action, Forward) and action.chunk == schedule.chunks - 1
    }
    return starts[opening], starts[closing]


def _busy_time(spans: Sequence[tuple[float, float]], opening: float, closing: float) -> float:
    return sum(max(0.0, min(end, closing) - max(start, opening)) for start, end in spans)


def _share(part: float, whole: float) -> float:
    """Part of a whole; a table whose actions take no time has no idle time either."""
    return part / whole if whole > 0 else 1.0


def _idle_share(busy: float, whole: float) -> float:
    """Idle part of a whole, without the rounding errors that would make it negative."""
    return max(0.0, 1.0 - _share(busy, whole))


def _peak_activations(row: Sequence[Action], chunks: int) -> float:
    live = peak = 0
    for action in row:
        if isinstance(action, Forward):
            live += 1
            peak = max(peak, live)
        elif isinstance(action, Backward):
            live -= 1
    return peak / chunks
