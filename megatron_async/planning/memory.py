# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Bytes that a rank of each stage holds, by kind."""

import argparse
import math
from collections.abc import Iterable, Iterator

from megatron_async.optim import options, registry
from megatron_async.optim.param_groups import MATRIX_ROLES
from megatron_async.planning.activations import ActivationModel
from megatron_async.planning.parameters import Parameter, Stage
from megatron_async.reference.delay import delay_of
from megatron_async.schedules import SimulationResult
from megatron_async.schedules.arguments import is_delayed, schedule_of

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
    """Bytes of each of KINDS on every rank of pipeline stage `index`; `simulated` is the schedule of the run."""
    weight = 2 if args.bf16 or args.fp16 else _FP32
    versions = simulated.weight_versions[index]
    held = [sum(parameter.local for parameter in chunk.parameters) for chunk in stage.chunks]
    total, last = sum(held), index == args.pipeline_model_parallel_size - 1
    kept = max(activations.in_flight(chunk) for chunk in stage.chunks) * len(stage.chunks)
    return {
        "weights": weight * total,
        "second_weight_version": weight * sum(size * (count - 1) for size, count in zip(held, versions, strict=False)),
        "gradients": _FP32 * total,
        "second_gradient_generation": _FP32 * total if is_delayed(args) else 0,
        "optimizer_state": _per_rank(args, _optimizer_state(args, stage)),
        "correction": _per_rank(args, _correction(args, stage, index)),
        "activations": math.ceil(simulated.live_activations[index] * kept)
        + max(activations.working(chunk, last and chunk is stage.chunks[-1]) for chunk in stage.chunks),
    }


def _per_rank(args: argparse.Namespace, sizes: Iterable[tuple[Parameter, int]]) -> int:
    """Bytes of (parameter, fp32 numbers), divided among data-parallel ranks where the optimizer is distributed."""
    ranks = experts = 1
    if args.use_distributed_optimizer or args.use_layer_wise_distributed_optimizer:
        ranks = args.data_parallel_size * args.context_parallel_size
        experts = args.world_size // (
            args.expert_tensor_parallel_size * args.expert_model_parallel_size * args.pipeline_model_parallel_size
        )
    return math.ceil(sum(_FP32 * size / (experts if parameter.is_expert else ranks) for parameter, size in sizes))


def _optimizer_state(args: argparse.Namespace, stage: Stage) -> Iterator[tuple[Parameter, int]]:
    """Master weights and the buffers of each parameter's optimizer; step counters are left out."""
    optimizers, masters = options.assignment(args), args.bf16 or args.fp16
    for parameter in stage.parameters:
        spec = registry.find(optimizers[parameter.role])
        yield parameter, spec.state_elements(parameter.shape) + (parameter.local if masters else 0)


def _correction(args: argparse.Namespace, stage: Stage, index: int) -> Iterator[tuple[Parameter, int]]:
    """The buffer of the staleness correction: one for each parameter with a delayed gradient."""
    if args.staleness_correction == "none":
        return
    delays = schedule_of(args).delays(args.pipeline_model_parallel_size, index)
    for chunk, delay in zip(stage.chunks, delays, strict=True):
        for parameter in chunk.parameters:
            if args.correct_matrices_only and parameter.role not in MATRIX_ROLES:
                continue
            if (delay_of(args, parameter.name) if args.gradient_delay is not None else delay) > 0:
                yield parameter, parameter.local
