# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A run's plan: parameters, layout over stages, schedule, memory and time, all from checked arguments."""

import argparse
from dataclasses import dataclass

from megatron_async.mcore.training import num_floating_point_operations
from megatron_async.planning import devices, memory
from megatron_async.planning.activations import ActivationModel
from megatron_async.planning.costs import CostModel
from megatron_async.planning.devices import Device
from megatron_async.planning.parameters import Stage, active, blocks, count_by_kind, numbers_by_chunk, stages
from megatron_async.planning.resolve import microbatches_of, precision_of
from megatron_async.planning.timing import BatchTime, batch_time, of_batch, simulator, stage_costs
from megatron_async.schedules import Schedule, SimulationResult


@dataclass(frozen=True, slots=True)
class Plan:
    """The estimates of a run.

    Attributes:
        stages: parameters and layers of each pipeline stage, from Megatron's own modules.
        by_kind: parameters of the whole model by kind.
        active: parameters that take part in one token.
        flops_per_token: forward and backward, by Megatron's count.
        microbatches: per batch and pipeline.
        schedule, simulated: a few batches of it, in seconds of compute.
        bytes_by_kind: on every rank of each stage.
        compute: seconds of a batch on each stage: forwards, backwards and update.
        time: of a batch, and what keeps ranks idle.
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
    compute: list[float]
    time: BatchTime
    assumptions: list[str]

    @property
    def total(self) -> int:
        """Parameters of the whole model."""
        return sum(self.by_kind.values())


def plan(args: argparse.Namespace) -> Plan:
    """Work out the plan of checked arguments (`padded_vocab_size` set); starts nothing and allocates no weights.

    Args:
        args: as `arguments.parse` returns them for a dry run.
    """
    device, model = devices.find(args.plan_device), blocks(args)
    parts, costs = stages(args, model), CostModel(args, device)
    by_kind = count_by_kind(parameter for stage in parts for parameter in stage.parameters)
    microbatches = microbatches_of(args)
    made = simulator(args.pipeline_schedule, args.pipeline_model_parallel_size, microbatches)
    times = costs.blocks(model)
    on_chunks = [[[times[number] for number in chunk] for chunk in chunks] for chunks in numbers_by_chunk(args)]
    by_stage = stage_costs(on_chunks)
    simulated = made.run(by_stage)
    activations = ActivationModel.of(args, model)
    return Plan(
        stages=parts,
        by_kind=by_kind,
        active=active(by_kind, args.num_experts, args.moe_router_topk),
        flops_per_token=float(num_floating_point_operations(args, 1)) / args.seq_length,
        microbatches=microbatches,
        schedule=made.schedule,
        simulated=simulated,
        bytes_by_kind=[memory.stage_bytes(args, parts[i], i, simulated, activations) for i in range(len(parts))],
        compute=of_batch(by_stage, microbatches),
        time=batch_time(args.pipeline_schedule, on_chunks, microbatches, costs.exchange(model)),
        assumptions=_assumptions(args, device),
    )


def _assumptions(args: argparse.Namespace, device: Device) -> list[str]:
    precision = precision_of(args)
    notes = [
        f"--plan-device {device.name}: {device.description}; {device.speed(precision) / 1e12:.4g} TFLOP/s in use, "
        f"{device.efficiency:.0%} of its {precision} peak ({device.efficiency_source})",
        f"{device.bandwidth_inside / 1e9:g} GB/s inside a node of {device.devices_per_node}, "
        f"{device.bandwidth_between / 1e9:g} GB/s between nodes; {device.launch_seconds * 1e6:g} us a kernel launch",
        "the backward takes twice the forward, three times with full recomputation; matrices of every size reach the "
        "same share of the peak: --pipeline-balance measured times the layers instead",
        "activations by arXiv 2205.05198's way of counting, small tensors left out; experts evenly loaded",
        "no allocator overhead, communication buffers or data; gradients and optimizer states in fp32",
    ]
    if args.gradient_delay is not None:
        notes.append("the older weights that --gradient-delay keeps are not counted")
    return notes + list(getattr(args, "dry_run_notes", ()))
