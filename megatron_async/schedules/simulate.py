# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Simulated execution of a table: times of the actions, bubble, live activations, weight versions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_async.schedules.actions import Action, Backward, Forward, Reduce, Schedule, Update
from megatron_async.schedules.dependencies import Key, execute, key_of, predecessors
from megatron_async.schedules.versions import peak_versions

Spans = tuple[tuple[tuple[float, float], ...], ...]
"""(start, end) of each action, indexed like the table."""
_HERE, _SENT, _REDUCED = range(3)
"""How an action gets what it needs: from its own rank, by a transfer, by a reduction."""


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Times of one rank in any unit.

    Attributes:
        forward: forward of one micro-batch through the rank's layers.
        backward: its backward, recomputation included.
        update: optimizer step of all weights of the rank.
        shares: share of each chunk in these times; empty for equal ones.
    """

    forward: float
    backward: float
    update: float = 0.0
    shares: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Result of `simulate`, in the unit of the costs.

    Busy time is the time in F, B and U. The *steady window* excludes filling and draining. With w a quarter of the
    batches, at least one batch and at least P micro-batches, it reaches on each rank from the first forward of batch
    first_batch + w on the last chunk to that of batch first_batch + batches - w. Tables with fewer than 2w + 1 batches
    have none: their steady shares are the total ones.

    Attributes:
        makespan: end of the last action.
        spans: (start, end) of each action, indexed like the table.
        busy: busy time of each rank.
        busy_share: busy time / makespan, for each rank.
        bubble_share: 1 - sum of busy times / (P * makespan); includes filling and draining.
        steady_busy_share: busy share within the steady window, for each rank.
        steady_bubble_share: 1 - sum of busy times within the steady windows / sum of their lengths.
        live_activations: most micro-batches whose activations a rank holds. A micro-batch in one chunk counts
            1 / chunks.
        weight_versions: most weight versions alive at once, for each rank and chunk.
    """

    makespan: float
    spans: Spans
    busy: tuple[float, ...]
    busy_share: tuple[float, ...]
    bubble_share: float
    steady_busy_share: tuple[float, ...]
    steady_bubble_share: float
    live_activations: tuple[float, ...]
    weight_versions: tuple[tuple[int, ...], ...]

    @property
    def shortest(self) -> float:
        """Time of the shortest action that takes time; 1 if there is none."""
        return min((end - start for row in self.spans for start, end in row if end > start), default=1.0)


class _Step(NamedTuple):
    """An action; `needed`: places of its predecessors in the order of all actions, and how it gets what it needs."""

    rank: int
    work: tuple[str, int]  # kind and chunk
    needed: tuple[tuple[int, int], ...]


class Simulator:
    """A table that can be run in time, with the order and the dependencies of its actions worked out once.

    Raises:
        ValueError: the table deadlocks.
    """

    def __init__(self, schedule: Schedule) -> None:
        order, blocked = execute(schedule)
        if blocked:
            raise ValueError(f"schedule {schedule.name} deadlocks on ranks {sorted(blocked)}; validate it first")
        self.schedule = schedule
        self._steps: list[_Step] = []
        positions: dict[Key, int] = {}
        for rank, step in order:
            action = schedule.actions[rank][step]
            needed = tuple(
                (positions[key], _REDUCED if isinstance(action, Update) else _SENT if key[0] != rank else _HERE)
                for key in predecessors(schedule, rank, action)
            )
            positions[key_of(rank, action)] = len(self._steps)
            self._steps.append(_Step(rank, (action.kind, action.chunk), needed))
        self._windows = [_steady_window(schedule, row) for row in schedule.actions]
        self._live = tuple(_peak_activations(row, schedule.chunks) for row in schedule.actions)
        self._versions = tuple(
            tuple(peak_versions(schedule, rank, chunk) for chunk in range(schedule.chunks))
            for rank in range(schedule.stages)
        )

    def run(
        self, costs: StageCosts | Sequence[StageCosts], *, transfer: float = 0.0, reduction: float = 0.0
    ) -> SimulationResult:
        """As `simulate`."""
        schedule = self.schedule
        rank_costs = [costs] * schedule.stages if isinstance(costs, StageCosts) else list(costs)
        _check_times(schedule, rank_costs, transfer, reduction)
        spans = self._spans(rank_costs, transfer, reduction)
        makespan = max(end for row in spans for _, end in row)
        busy = list(map(_busy_time, spans))
        steady, lengths = list(busy), [makespan] * len(spans)
        for rank, (row, window) in enumerate(zip(spans, self._windows, strict=True)):
            if window is not None:
                first, last = window
                steady[rank], lengths[rank] = _busy_time(row[first:last]), row[last][0] - row[first][0]
        return SimulationResult(
            makespan=makespan,
            spans=spans,
            busy=tuple(busy),
            busy_share=tuple(_share(time, makespan) for time in busy),
            bubble_share=max(0.0, 1.0 - _share(sum(busy), schedule.stages * makespan)),
            steady_busy_share=tuple(map(_share, steady, lengths)),
            steady_bubble_share=max(0.0, 1.0 - _share(sum(steady), sum(lengths))),
            live_activations=self._live,
            weight_versions=self._versions,
        )

    def _spans(self, costs: Sequence[StageCosts], transfer: float, reduction: float) -> Spans:
        chunks = self.schedule.chunks
        kinds = Forward.kind, Backward.kind, Update.kind, Reduce.kind
        durations = [
            {
                (kind, chunk): time * (own.shares[chunk] if own.shares else 1 / chunks)
                for kind, time in zip(kinds, (own.forward, own.backward, own.update, 0.0), strict=True)
                for chunk in range(chunks)
            }
            for own in costs
        ]
        latencies, ends = (0.0, transfer, reduction), list[float]()
        spans: list[list[tuple[float, float]]] = [[] for _ in costs]
        free = [0.0] * len(costs)
        for rank, work, needed in self._steps:
            start = free[rank]
            for position, way in needed:
                if (ready := ends[position] + latencies[way]) > start:
                    start = ready
            free[rank] = end = start + durations[rank][work]
            ends.append(end)
            spans[rank].append((start, end))
        return tuple(map(tuple, spans))


def simulate(
    schedule: Schedule,
    costs: StageCosts | Sequence[StageCosts],
    *,
    transfer: float = 0.0,
    reduction: float = 0.0,
) -> SimulationResult:
    """Run a table in time: every rank runs its actions in order, each as early as possible.

    Transfers and reductions run beside compute. An update starts `reduction` after the R of its batch, on all ranks
    or on its own rank (`reduction_across_ranks`).

    Args:
        schedule: a valid table; a `Simulator` runs one several times.
        costs: one for each rank, or one for all ranks.
        transfer: time of one activation or gradient between two ranks.
        reduction: time of the reductions of one batch.

    Raises:
        ValueError: negative times, wrong number of costs, or a deadlock.
    """
    return Simulator(schedule).run(costs, transfer=transfer, reduction=reduction)


def _check_times(schedule: Schedule, costs: Sequence[StageCosts], transfer: float, reduction: float) -> None:
    problems = [
        f"shares {own.shares}: give one for each of {schedule.chunks} chunks"
        for own in costs
        if own.shares and len(own.shares) != schedule.chunks
    ]
    if len(costs) != schedule.stages:
        problems.append(f"costs of {len(costs)} ranks for {schedule.stages} stages: give one for each")
    times = [transfer, reduction] + [time for c in costs for time in (c.forward, c.backward, c.update)]
    if min(times) < 0:
        problems.append(f"time {min(times)}: must not be negative")
    if problems:
        raise ValueError("; ".join(problems))


def _steady_window(schedule: Schedule, row: Sequence[Action]) -> tuple[int, int] | None:
    """Places in a rank's row of the forwards at which its steady window opens and closes."""
    margin = max(-(-schedule.stages // schedule.microbatches), schedule.batches // 4)
    if schedule.batches < 2 * margin + 1:
        return None
    numbers = schedule.microbatch_range
    places = {
        action.microbatch: place
        for place, action in enumerate(row)
        if isinstance(action, Forward) and action.chunk == schedule.chunks - 1
    }
    width = margin * schedule.microbatches
    return places[numbers.start + width], places[numbers.stop - width]


def _busy_time(spans: Sequence[tuple[float, float]]) -> float:
    return sum([end - start for start, end in spans])


def _share(part: float, whole: float) -> float:
    """Part of a whole. A table whose actions take no time has no idle time."""
    return part / whole if whole > 0 else 1.0


def _peak_activations(row: Sequence[Action], chunks: int) -> float:
    live = peak = 0
    for action in row:
        live += isinstance(action, Forward) - isinstance(action, Backward)
        peak = max(peak, live)
    return peak / chunks
