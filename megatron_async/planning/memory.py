# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Bytes that a rank of each stage holds, by kind."""

import argparse
import math
from collections import Counter
from collections.abc import Iterable, Sequence

from megatron_async.optim import options, registry
from megatron_async.optim.param_groups import MATRIX_ROLES, Assignment
from megatron_async.planning.activations import ActivationModel
from megatron_async.planning.parameters import Parameter, Stage
from megatron_async.planning.resolve import width_of
from megatron_async.reference.delay import delay_of
from megatron_async.schedules import SimulationResult
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


def stage_bytes(
    args: argparse.Namespace, stage: Stage, index: int, simulated: SimulationResult, activations: ActivationModel
) -> dict[str, int]:
    """Bytes of each of KINDS on the fullest rank of pipeline stage `index`; `simulated` is the schedule of the run."""
    versions, delays = simulated.weight_versions[index], chunk_delays(args, index)
    held = dict.fromkeys(KINDS, 0.0)
    for chunk, count, delay in zip(stage.chunks, versions, delays, strict=True):
        for kind, size in fixed(args, chunk.parameters, count, delay).items():
            held[kind] += size
    if args.use_layer_wise_distributed_optimizer:
        held |= _largest_owner(args, stage, delays)
    if args.freeze_all_layers:
        held = dict.fromkeys(KINDS, 0.0) | {"weights": held["weights"]}
    last = index == args.pipeline_model_parallel_size - 1
    held["activations"] = live_bytes(
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
    ranks, expert_ranks = _owners(args)
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


def _owners(args: argparse.Namespace) -> tuple[int, int]:
    """Ranks that share the optimizer state of a parameter, and of an expert."""
    if not (args.use_distributed_optimizer or args.use_layer_wise_distributed_optimizer):
        return 1, 1
    experts = args.expert_tensor_parallel_size * args.expert_model_parallel_size * args.pipeline_model_parallel_size
    return args.data_parallel_size, args.world_size // experts


def _largest_owner(args: argparse.Namespace, stage: Stage, delays: Sequence[int]) -> dict[str, float]:
    """State and correction of the rank that owns most, where ranks own whole parameters.

    Megatron's layer-wise optimizer sorts parameters by size and deals them out to ranks 0 .. n-1, n-1 .. 0, and so on.
    Each chunk may have an optimizer of its own.
    """
    optimizers = options.assignment(args)
    totals: list[Counter[int]] = [Counter(), Counter()]
    corrections: list[Counter[int]] = [Counter(), Counter()]
    for chunk, delay in zip(stage.chunks, delays, strict=True):
        for experts, ranks in enumerate(_owners(args)):
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
