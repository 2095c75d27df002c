# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Bytes that a rank of each stage holds, by kind."""

import argparse
import math
from collections.abc import Iterable

from megatron_async.optim import registry
from megatron_async.planning.activations import ActivationModel
from megatron_async.planning.parameters import Parameter, Stage
from megatron_async.schedules import SimulationResult
from megatron_async.schedules.arguments import is_delayed

KINDS = (
    "weights",
    "second_weight_version",
    "gradients",
    "second_gradient_generation",
    "optimizer_state",
    "error_feedback",
    "activations",
)
_FP32 = 4


def stage_bytes(
    args: argparse.Namespace, stage: Stage, index: int, simulated: SimulationResult, activations: ActivationModel
) -> dict[str, int]:
    """Bytes of each of KINDS on every rank of pipeline stage `index`.

    Args:
        args: checked arguments.
        stage: what its ranks hold.
        index: number of the stage.
        simulated: the schedule in time: weight versions and micro-batches in flight.
        activations: of this run.
    """
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
        "optimizer_state": _sharded(args, stage.parameters, lambda parameter: _state_bytes(args, parameter)),
        "error_feedback": _sharded(args, stage.parameters, lambda parameter: _FP32 * parameter.local)
        if args.staleness_correction == "error-feedback"
        else 0,
        "activations": math.ceil(simulated.live_activations[index] * kept)
        + max(activations.working(chunk, last and chunk is stage.chunks[-1]) for chunk in stage.chunks),
    }


def _sharded(args: argparse.Namespace, parameters: Iterable[Parameter], size_of: object) -> int:
    """Sum over parameters, divided among data-parallel ranks where the optimizer is distributed."""
    assert callable(size_of)
    if not args.use_distributed_optimizer and not args.use_layer_wise_distributed_optimizer:
        return sum(size_of(parameter) for parameter in parameters)
    experts = args.world_size // (
        args.expert_tensor_parallel_size * args.expert_model_parallel_size * args.pipeline_model_parallel_size
    )
    ranks = args.data_parallel_size * args.context_parallel_size
    return math.ceil(sum(size_of(parameter) / (experts if parameter.is_expert else ranks) for parameter in parameters))


def _state_bytes(args: argparse.Namespace, parameter: Parameter) -> int:
    """Master weights and the optimizer's buffers, fp32; the optimizer's small ones (steps) are left out."""
    master = _FP32 * parameter.local if args.bf16 or args.fp16 else 0
    spec = registry.find(args.optimizer)
    if spec.scope == "matrix" and not parameter.is_matrix:
        spec = registry.find("adam")
    return master + _FP32 * spec.state_elements(parameter.shape)
