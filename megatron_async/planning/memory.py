# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Bytes that a rank of each stage holds, by kind."""

import argparse
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

from megatron_async.optim import options, registry
from megatron_async.optim.param_groups import MATRIX_ROLES, Assignment
from megatron_async.planning.activations import ActivationModel
from megatron_async.planning.parameters import Block, Chunk, Parameter, Stage, on_stages
from megatron_async.planning.resolve import microbatches_of, owners_of, width_of
from megatron_async.planning.split import Ends, cut, places
from megatron_async.planning.timing import simulator
from megatron_async.reference.delay import delay_of
from megatron_async.schedules import SimulationResult, StageCosts
from megatron_async.schedules.arguments import schedule_of

KINDS = {
    "weights": "weights",
    "second_weight_version": "2nd version",
    "gradients": "gradients",
    "second_gradient_generation": "2nd gradients",
    "optimizer_state": "optimizer",
    "correction": "correction",
    "activations": "activations",
}
"""Names in the JSON object, and headings in the table."""
_FP32 = 4
"""Bytes of a number."""


def stage_bytes(
    args: argparse.Namespace, stage: Stage, index: int, simulated: SimulationResult, activations: ActivationModel
) -> dict[str, int]:
    """Bytes of each of KINDS on the fullest rank of pipeline stage `index`; `simulated` is the schedule of the run."""
    versions, delays = simulated.weight_versions[index], chunk_delays(args, index)
    held = dict.fromkeys(KINDS, 0.0)
    for chunk, count, delay in zip(stage.chunks, versions, delays, strict=True):
        for kind, size in fixed(args, chunk.parameters, count, delay).items():
            held[kind] += size
    if args.use_layer_wise_distributed_optimizer and not args.freeze_all_layers:
        held |= _largest_owner(args, stage, delays)
    last = index == args.pipeline_model_parallel_size - 1
    held["activations"] = activations.messages(index) + live_bytes(
        simulated.live_activations[index],
        [activations.in_flight(chunk) for chunk in stage.chunks],
        [activations.working(chunk, last and chunk is stage.chunks[-1]) for chunk in stage.chunks],
    )
    return {kind: math.ceil(size) for kind, size in held.items()}


def live_bytes(live: float, kept: Sequence[int], working: Sequence[int]) -> float:
    """Bytes of activations from those of each chunk, in units of all chunks of a rank; see `ActivationModel`."""
    return live * max(kept) * len(kept) + max(working)


def chunk_delays(args: argparse.Namespace, stage: int) -> tuple[int, ...]:
    """Gradient delay of each chunk of a stage under the run's schedule."""
    return schedule_of(args).delays(args.pipeline_model_parallel_size, stage)


def fixed(args: argparse.Namespace, parameters: Iterable[Parameter], versions: int, delay: int) -> dict[str, float]:
    """Bytes for parameters of a chunk, by kind, without activations; a sharded state is spread evenly."""
    weight = width_of(args)
    held: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    if args.freeze_all_layers:
        return held | {"weights": weight * sum(own.local for own in parameters)}
    ranks, expert_ranks = owners_of(args)
    optimizers, delayed = options.assignment(args), delay > 0 or args.gradient_delay is not None
    for own in parameters:
        share = expert_ranks if own.is_expert else ranks
        held["weights"] += weight * own.local
        held["second_weight_version"] += weight * own.local * (versions - 1)
        held["gradients"] += _FP32 * own.local
        held["second_gradient_generation"] += _FP32 * own.local if delayed else 0
        held["optimizer_state"] += _FP32 * _state(args, optimizers, own) / share
        held["correction"] += _FP32 * _correction(args, own, delay) / share
    return held


def _largest_owner(args: argparse.Namespace, stage: Stage, delays: Sequence[int]) -> dict[str, float]:
    """State and correction of the rank that owns most, where ranks own whole parameters.

    Megatron's layer-wise optimizer sorts parameters by size and deals them out to ranks 0 .. n-1, n-1 .. 0, and so on.
    Each chunk may have an optimizer of its own.
    """
    optimizers = options.assignment(args)
    totals: list[Counter[int]] = [Counter(), Counter()]
    corrections: list[Counter[int]] = [Counter(), Counter()]
    for chunk, delay in zip(stage.chunks, delays, strict=True):
        for experts, ranks in enumerate(owners_of(args)):
            items = sorted(
                (own for own in chunk.parameters if own.is_expert == bool(experts) for _ in range(own.number)),
                key=lambda own: math.prod(own.shape),
            )
            order = [*range(ranks), *reversed(range(ranks))]
            for place, own in enumerate(items):
                rank = order[place % len(order)]
                totals[experts][rank] += _state(args, optimizers, own) // own.number
                corrections[experts][rank] += _correction(args, own, delay) // own.number
    return {
        "optimizer_state": _FP32 * sum(max(counts.values(), default=0) for counts in totals),
        "correction": _FP32 * sum(max(counts.values(), default=0) for counts in corrections),
    }


def _state(args: argparse.Namespace, optimizers: Assignment, own: Parameter) -> int:
    """Numbers of master weights and of the buffers of a parameter's optimizer; step counters are left out."""
    masters = own.local if width_of(args) < _FP32 else 0
    return masters + own.number * registry.find(optimizers[own.role]).state_elements(own.shape)


def _correction(args: argparse.Namespace, own: Parameter, delay: int) -> int:
    """Numbers in the buffer of the staleness correction: one for each parameter with a delayed gradient."""
    if args.staleness_correction == "none" or (args.correct_matrices_only and own.role not in MATRIX_ROLES):
        return 0
    return own.local if (delay_of(args, own.name) if args.gradient_delay is not None else delay) > 0 else 0


@lru_cache(maxsize=256)
def _occupancy(schedule: str, stages: int, microbatches: int) -> SimulationResult:
    """What a schedule keeps alive on each stage; it depends on the order of actions alone."""
    few = min(microbatches, 3 * stages)
    return simulator(schedule, stages, few, batches=3).run(StageCosts(1.0, 2.0))


class StageMemory:
    """Bytes of parts of the row of blocks on a rank of a stage."""

    def __init__(self, args: argparse.Namespace, model: Sequence[Block]) -> None:
        self._args, self._model = args, on_stages(args, model)
        stages = args.pipeline_model_parallel_size
        self._simulated = _occupancy(args.pipeline_schedule, stages, max(1, microbatches_of(args)))
        self._delays = [chunk_delays(args, stage) for stage in range(stages)]
        self._activations = ActivationModel.of(args, model)
        chunks = [Chunk.of(self._model, [number]) for number in range(len(model))]
        self._kept = list(accumulate(map(self._activations.in_flight, chunks), initial=0))
        self._recomputed = [self._activations.working(chunk, False) for chunk in chunks]
        self._logits = self._activations.working(Chunk((), ()), True)
        self._fixed: dict[tuple[int, int], list[float]] = {}

    def part(self, stage: int, start: int, end: int) -> float:
        """Bytes of blocks [start, end) as the only chunk of a stage; sharded states are spread evenly."""
        return self._bytes(stage, ((start, end),))

    def largest(self, ends: Ends) -> int:
        """Bytes of the fullest rank of a split."""
        stages, rows = self._args.pipeline_model_parallel_size, places(ends)
        if not self._args.use_layer_wise_distributed_optimizer:
            return math.ceil(max(self._bytes(stage, rows[stage::stages]) for stage in range(stages)))

        def held(stage: int) -> int:
            chunks = tuple(Chunk.of(self._model, range(*row)) for row in rows[stage::stages])
            sizes = stage_bytes(self._args, Stage(chunks), stage, self._simulated, self._activations)
            return sum(sizes.values())

        return max(map(held, range(stages)))

    def least(self) -> int:
        """Bytes of the fullest stage in the split that needs the least."""
        ends = cut(len(self._model), self._args.pipeline_model_parallel_size, self.part)
        return 0 if ends is None else self.largest(ends)

    def _bytes(self, stage: int, rows: Sequence[tuple[int, int]]) -> float:
        """As `stage_bytes`, from sums over blocks."""
        fixed = 0.0
        for (start, end), *key in zip(rows, self._simulated.weight_versions[stage], self._delays[stage], strict=True):
            sums = self._fixed_sums(key[0], key[1])
            fixed += sums[end] - sums[start]
        kept = [self._kept[end] - self._kept[start] for start, end in rows]
        logits = (self._logits if end == len(self._model) else 0 for _, end in rows)
        working = [max(self._recomputed[slice(*row)]) + own for row, own in zip(rows, logits, strict=True)]
        kept_and_working = live_bytes(self._simulated.live_activations[stage], kept, working)
        return fixed + self._activations.messages(stage) + kept_and_working

    def _fixed_sums(self, versions: int, delay: int) -> list[float]:
        """Sums of the bytes of the first blocks without activations; layers of one kind are counted once."""
        if (versions, delay) not in self._fixed:
            known: dict[Any, float] = {}
            sizes = []
            for own in self._model:
                if own.alike not in known:
                    known[own.alike] = sum(fixed(self._args, own.parameters, versions, delay).values())
                sizes.append(known[own.alike])
            self._fixed[versions, delay] = list(accumulate(sizes, initial=0.0))
        return self._fixed[versions, delay]
