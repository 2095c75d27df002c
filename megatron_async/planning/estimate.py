# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A run's plan: parameters, layout over stages, schedule, memory and time, all from checked arguments."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_async.mcore.training import num_floating_point_operations
from megatron_async.planning import memory
from megatron_async.planning.activations import ActivationModel
from megatron_async.planning.parameters import Parameter, Stage, active, count_by_kind, stages
from megatron_async.schedules import Schedule, SimulationResult, StageCosts, make_schedule, simulate
from megatron_async.schedules.arguments import schedule_of

# Of a device, in use: 40 % of an H100's 989 TFLOP/s in dense bf16 (its data sheet), which large dense models reach.
# Models with small experts reach less.
GPU_FLOPS = 400e12
# Of a process with one thread: measured with the miniatures here, 0.007 to 0.04 TFLOP/s.
CPU_FLOPS = 0.03e12
_BATCHES = 5  # enough for a steady state between filling and draining the pipe


@dataclass(frozen=True, slots=True)
class Plan:
    """The estimates of a run.

    Attributes:
        stages: parameters and layers of each pipeline stage, from Megatron's own modules.
        by_kind: parameters of the whole model by kind.
        active: parameters that take part in one token.
        flops_per_token: forward and backward, by Megatron's count.
        microbatches: per batch and pipeline.
        schedule, simulated: a few batches of it, in seconds.
        bytes_by_kind: on every rank of each stage.
        seconds_per_batch: estimate.
        assumptions: one sentence each.
    """

    stages: list[Stage]
    by_kind: dict[str, int]
    active: int
    flops_per_token: float
    microbatches: int
    schedule: Schedule
    simulated: SimulationResult
    bytes_by_kind: list[dict[str, int]]
    seconds_per_batch: float
    assumptions: list[str]

    @property
    def total(self) -> int:
        """Parameters of the whole model."""
        return sum(self.by_kind.values())


def plan(args: argparse.Namespace, flops_per_second: float | None = None) -> Plan:
    """Work out the plan of checked arguments (`padded_vocab_size` set); starts nothing and allocates no weights.

    Args:
        args: as `arguments.parse` returns them for a dry run.
        flops_per_second: of a device in use; None assumes a figure.
    """
    speed = flops_per_second or (GPU_FLOPS if args.device == "cuda" else CPU_FLOPS)
    parts = stages(args)
    by_kind = count_by_kind(parameter for stage in parts for parameter in stage.parameters)
    flops = float(num_floating_point_operations(args, 1))
    microbatches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    batches = _BATCHES * (args.pipeline_model_parallel_size if schedule_of(args).update_per_microbatch else 1)
    schedule = make_schedule(args.pipeline_schedule, args.pipeline_model_parallel_size, microbatches, batches)
    simulated = simulate(schedule, _costs(args, parts, flops, speed))
    activations = ActivationModel.of(args)
    return Plan(
        stages=parts,
        by_kind=by_kind,
        active=active(by_kind, args.num_experts, args.moe_router_topk),
        flops_per_token=flops / args.seq_length,
        microbatches=microbatches,
        schedule=schedule,
        simulated=simulated,
        bytes_by_kind=[memory.stage_bytes(args, parts[i], i, simulated, activations) for i in range(len(parts))],
        seconds_per_batch=_seconds_per_batch(args, schedule, simulated),
        assumptions=_assumptions(args, speed),
    )


def _costs(args: argparse.Namespace, parts: Sequence[Stage], flops: float, speed: float) -> list[StageCosts]:
    """Seconds of one micro-batch on each stage: the model's FLOPs, shared out by parameters that are multiplied."""
    multiplied = [sum(_multiplied(args, parameter) for parameter in stage.parameters) for stage in parts]
    one_pass = flops * args.micro_batch_size / 3 / (args.tensor_model_parallel_size * args.context_parallel_size)
    backward = 3.0 if args.recompute_granularity == "full" else 2.0
    seconds = [one_pass * share / sum(multiplied) / speed for share in multiplied]
    return [StageCosts(forward=time, backward=backward * time) for time in seconds]


def _multiplied(args: argparse.Namespace, parameter: Parameter) -> float:
    """Parameters that a token is multiplied with: no table look-up, and of the experts those that it is sent to."""
    if parameter.duplicate or (parameter.kind == "embedding" and args.untie_embeddings_and_output_weights):
        return parameter.local * parameter.copies if parameter.duplicate else 0.0
    if parameter.kind == "embedding":
        # Tied: the table is multiplied with on the last stage, where a pipeline holds a copy of it.
        return float(parameter.whole) if args.pipeline_model_parallel_size == 1 else 0.0
    return parameter.whole * (args.moe_router_topk / args.num_experts if parameter.is_expert else 1.0)


def _seconds_per_batch(args: argparse.Namespace, schedule: Schedule, simulated: SimulationResult) -> float:
    """1F1B fills and drains in every batch; the others go at the pace of their slowest stage."""
    if not schedule_of(args).delayed:
        return simulated.makespan / schedule.batches
    slowest = max(range(schedule.stages), key=lambda rank: simulated.busy[rank])
    return simulated.busy[slowest] / schedule.batches / simulated.steady_busy_share[slowest]


def _assumptions(args: argparse.Namespace, speed: float) -> list[str]:
    notes = [
        f"{speed / 1e12:g} TFLOP/s of each device in use; communication and optimizer steps hidden or free",
        "the backward takes twice the forward, three times with full recomputation; every stage waits for its slowest "
        "neighbor alone",
        "activations by arXiv 2205.05198's way of counting, small tensors left out; experts evenly loaded",
        "no allocator overhead, communication buffers or data; gradients and optimizer states in fp32",
    ]
    if args.gradient_delay is not None:
        notes.append("the older weights that --gradient-delay keeps are not counted")
    return notes + list(getattr(args, "dry_run_notes", ()))
