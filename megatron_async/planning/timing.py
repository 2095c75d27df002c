# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Time of a batch from the simulator, and what keeps ranks idle, by cause."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatron_async.schedules import SCHEDULES, Simulator, StageCosts, make_schedule

CAUSES = ("imbalance", "schedule", "transfers", "host", "update")
BATCHES = 5
"""Enough for a steady state between filling and draining the pipe."""


@dataclass(frozen=True, slots=True)
class BlockTime:
    """Seconds of one micro-batch on the device, and of the host's launches.

    Attributes:
        forward, backward: on the device, with collectives of tensor and expert parallelism; the backward recomputes.
        launches: of the host, forward and backward together.
    """

    forward: float
    backward: float
    launches: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True, slots=True)
class Exchange:
    """Seconds beside the compute: an activation between two stages, and the reductions and steps of a batch."""

    transfer: float
    reduction: float
    update: float


@dataclass(frozen=True, slots=True)
class BatchTime:
    """Seconds of a batch.

    Attributes:
        seconds: of the batch.
        compute: of the mean rank.
        idle: seconds added by each of CAUSES, one after the other.
    """

    seconds: float
    compute: float
    idle: dict[str, float]

    @property
    def bubble(self) -> float:
        """Idle share of the batch's time."""
        return 1.0 - self.compute / self.seconds if self.seconds else 0.0

    @property
    def idle_text(self) -> str:
        """The idle share, and the share of each cause."""
        causes = [f"{cause} {seconds / self.seconds:.1%}" for cause, seconds in self.idle.items()]
        return f"{self.bubble:.1%} of the time of all devices: {', '.join(causes)}"


def stage_costs(parts: Sequence[Sequence[Sequence[BlockTime]]], *, host: bool = False) -> list[StageCosts]:
    """Costs of each rank from the blocks of its chunks; `host`: a pass takes at least the time of its launches."""
    found = []
    for chunks in parts:
        blocks = [block for chunk in chunks for block in chunk]
        forward, backward = sum(block.forward for block in blocks), sum(block.backward for block in blocks)
        factor = max(1.0, sum(block.launches for block in blocks) / (forward + backward or 1.0)) if host else 1.0
        totals = [sum(block.total for block in chunk) for chunk in chunks]
        whole = sum(totals)
        shares = tuple(total / whole for total in totals) if len(chunks) > 1 and whole else ()
        found.append(StageCosts(forward * factor, backward * factor, shares=shares))
    return found


def batch_time(
    name: str, parts: Sequence[Sequence[Sequence[BlockTime]]], microbatches: int, exchange: Exchange
) -> BatchTime:
    """Time of a batch under the schedule `name`.

    Args:
        parts: for each rank and chunk the times of its blocks.
        microbatches: per batch and pipeline.
    """
    costs, hosted = stage_costs(parts), stage_costs(parts, host=True)
    totals = [own.forward + own.backward for own in costs]
    mean, slowest = sum(totals) / len(totals), max(totals)
    times = [
        microbatches * mean,
        microbatches * slowest,
        _seconds(name, tuple(costs), microbatches, 0.0),
        _seconds(name, tuple(costs), microbatches, exchange.transfer),
        _seconds(name, tuple(hosted), microbatches, exchange.transfer),
    ]
    reduction = exchange.reduction
    if SCHEDULES[name].delayed:  # an update is due when its batch's weights are, in the next batch
        reduction = max(0.0, reduction - (microbatches - len(costs) + 1) * slowest)
    times.append(times[-1] + reduction + exchange.update)
    idle = {cause: max(0.0, times[i + 1] - times[i]) for i, cause in enumerate(CAUSES)}
    return BatchTime(times[0] + sum(idle.values()), times[0], idle)


def _seconds(name: str, costs: tuple[StageCosts, ...], microbatches: int, transfer: float) -> float:
    """Seconds of a batch; one of many micro-batches from two smaller ones, since each further one adds the same."""
    stages = len(costs)
    small, large = 2 * stages, 3 * stages
    if microbatches <= large:
        return _period(name, costs, microbatches, transfer)
    first, second = (_period(name, costs, number, transfer) for number in (small, large))
    return second + (microbatches - large) * (second - first) / (large - small)


@lru_cache(maxsize=4096)
def _period(name: str, costs: tuple[StageCosts, ...], microbatches: int, transfer: float) -> float:
    return period(simulator(name, len(costs), microbatches), costs, transfer)


@lru_cache(maxsize=256)
def simulator(name: str, stages: int, microbatches: int, batches: int = BATCHES) -> Simulator:
    """Of a few batches of a schedule."""
    batches *= stages if SCHEDULES[name].update_per_microbatch else 1
    return Simulator(make_schedule(name, stages, microbatches, batches))


def period(simulator: Simulator, costs: Sequence[StageCosts], transfer: float = 0.0) -> float:
    """Time of a batch: synchronous schedules fill and drain in each; the others go at the pace of the slowest rank."""
    schedule, simulated = simulator.schedule, simulator.run(costs, transfer=transfer)
    if not SCHEDULES[schedule.name].delayed:
        return simulated.makespan / schedule.batches
    slowest = max(range(schedule.stages), key=lambda rank: simulated.busy[rank])
    return simulated.busy[slowest] / schedule.batches / simulated.steady_busy_share[slowest]
