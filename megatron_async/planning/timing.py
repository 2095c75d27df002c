# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Time of a batch from the simulator, and what keeps ranks idle, by cause."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from megatron_async.schedules import SCHEDULES, Simulator, StageCosts, make_schedule

CAUSES = ("imbalance", "schedule", "transfers", "host", "update")
BATCHES = 5
"""Enough for a steady state between filling and draining the pipe."""


@dataclass(frozen=True, slots=True)
class BlockTime:
    """Seconds of a block.

    Attributes:
        forward, backward: of one micro-batch on the device, with collectives of tensor and expert parallelism; the
            backward recomputes.
        launches: of the host for one micro-batch, forward and backward together.
        update: of one batch's update of its parameters on the device.
    """

    forward: float
    backward: float
    launches: float = 0.0
    update: float = 0.0

    @property
    def total(self) -> float:
        """Of one micro-batch, forward and backward."""
        return self.forward + self.backward

    def of_batch(self, microbatches: int) -> float:
        """Of a batch of so many micro-batches: what stages are balanced by."""
        return microbatches * self.total + self.update


@dataclass(frozen=True, slots=True)
class Exchange:
    """Seconds beside the compute: an activation between two stages, and the reductions of a batch."""

    transfer: float
    reduction: float


@dataclass(frozen=True, slots=True)
class BatchTime:
    """Seconds of a batch.

    Attributes:
        seconds: of the batch.
        compute: forwards and backwards of the mean rank.
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
        update = sum(block.update for block in blocks)
        factor = max(1.0, sum(block.launches for block in blocks) / (forward + backward or 1.0)) if host else 1.0
        totals = [sum(block.total for block in chunk) for chunk in chunks]
        whole = sum(totals)
        shares = tuple(total / whole for total in totals) if len(chunks) > 1 and whole else ()
        found.append(StageCosts(forward * factor, backward * factor, update, shares))
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
    alone, alone_hosted = ([replace(own, update=0.0) for own in each] for each in (costs, hosted))
    totals = [own.forward + own.backward for own in costs]
    slowest = max(totals)
    reduction = exchange.reduction
    if SCHEDULES[name].delayed:  # an update is due when its batch's weights are, in the next batch
        reduction = max(0.0, reduction - (microbatches - len(costs) + 1) * slowest)
    times = [
        microbatches * sum(totals) / len(totals),
        microbatches * slowest,
        batch_seconds(name, alone, microbatches),
        batch_seconds(name, alone, microbatches, exchange.transfer),
        batch_seconds(name, alone_hosted, microbatches, exchange.transfer),
        batch_seconds(name, hosted, microbatches, exchange.transfer) + reduction,
    ]
    idle = {cause: max(0.0, after - before) for cause, (before, after) in zip(CAUSES, pairwise(times), strict=True)}
    return BatchTime(times[0] + sum(idle.values()), times[0], idle)


def of_batch(costs: Sequence[StageCosts], microbatches: int) -> list[float]:
    """Seconds of each rank for a batch: forwards, backwards and update."""
    return [microbatches * (own.forward + own.backward) + own.update for own in costs]


def batch_seconds(name: str, costs: Sequence[StageCosts], microbatches: int, transfer: float = 0.0) -> float:
    """Seconds of a batch; one of many micro-batches from two smaller ones, since each further one adds the same."""
    stages = len(costs)
    small, large = 2 * stages, 3 * stages
    if microbatches <= large:
        return _period(name, tuple(costs), microbatches, transfer)
    first, second = (_period(name, tuple(costs), number, transfer) for number in (small, large))
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
