# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Steps on paper: the schedules' tables at sizes that nobody here has, with every assumption stated.

Nothing in this module is measured. Times come from counted operations and assumed rates; the tables are simulated.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.formulas import MicroBatchCosts, dualpipe_bubble, interleaved_bubble, zb1p_bubble
from megatron_async.schedules import SCHEDULES, StageCosts, make_schedule, simulate

DEVICES = (64, 256, 1024, 2048, 4096)


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Rates of one device and its network.

    Attributes:
        flops: dense bf16 peak, operations per second (H100 SXM data sheet).
        utilization: share of it that layers reach, without any bubble.
        stage_bandwidth: bytes per second between neighboring stages (400 Gbit/s network).
        reduce_bandwidth: bytes per second of the gradient reduction on each device.
        activation_bytes: kept for each layer, token and hidden channel with fused attention: 34, arXiv 2205.05198,
            equation 2, without the attention scores.
    """

    flops: float = 989e12
    utilization: float = 0.4
    stage_bandwidth: float = 50e9
    reduce_bandwidth: float = 50e9
    activation_bytes: float = 34.0


@dataclass(frozen=True, slots=True)
class Layout:
    """A model, its batch and how it is cut; the rest of the devices is data parallelism.

    Attributes:
        dense, experts: parameters that every token uses or that all ranks of expert parallelism share, and parameters
            of routed experts.
        active: parameters that one token uses.
        smaller_side: typical smaller side of a weight matrix, for the cost of Newton-Schulz.
        batch: sequences per optimizer step.
        source: where shape and layout come from.
    """

    name: str
    dense: float
    experts: float
    active: float
    layers: int
    hidden: int
    smaller_side: int
    sequence: int
    batch: int
    tensor: int
    stages: int
    expert_ranks: int
    source: str

    @property
    def local_parameters(self) -> float:
        """Parameters on one device."""
        return self.dense / (self.tensor * self.stages) + self.experts / (self.stages * self.expert_ranks)


LAYOUTS: Sequence[Layout] = (
    Layout(
        "10B hybrid MoE", 0.5e9, 9.66e9, 0.65e9, 24, 1024, 256, 8192, 512, 1, 8, 8,
        "arXiv 2606.30634: 4M tokens per batch, 64 devices; 8 stages x 8 expert ranks is our guess",
    ),
    Layout(
        "DeepSeek-V3-like", 15e9, 656e9, 37e9, 61, 7168, 2048, 4096, 15360, 1, 16, 64,
        "arXiv 2412.19437: 16 stages x 64 expert ranks, 15,360 sequences",
    ),
    Layout(
        "Llama-3-405B-like", 405e9, 0.0, 405e9, 126, 16384, 16384, 8192, 2048, 8, 16, 1,
        "arXiv 2407.21783: tensor 8 x 16 stages, 16M tokens per batch",
    ),
)  # fmt: skip

_WITH_TABLE = ("1f1b", "2bw", "2bw-eager", "wpipe")
_BY_FORMULA = ("interleaved-1f1b", "zb1p", "dualpipe")


@dataclass(frozen=True, slots=True)
class Estimate:
    """One schedule of a layout on a number of devices; `problem` where it cannot run, all else 0 then.

    Attributes:
        step_s: seconds per optimizer step.
        bubble: share of that time in which a device computes nothing; update included in compute.
        tokens_per_s: of the whole job.
        memory_gb: most on one device, by 10^9 bytes: weights, gradients, optimizer, activations.
    """

    schedule: str
    devices: int
    microbatches: int
    step_s: float = 0.0
    bubble: float = 0.0
    tokens_per_s: float = 0.0
    memory_gb: float = 0.0
    problem: str = ""


def estimates(layout: Layout, devices: Sequence[int], assumed: Assumptions) -> Iterator[Estimate]:
    """Every schedule on every number of devices that the layout can be spread over."""
    for count in devices:
        replicas = count // (layout.tensor * layout.stages)
        if count % (layout.tensor * layout.stages) or replicas % layout.expert_ranks or layout.batch % replicas:
            continue
        microbatches = layout.batch // replicas
        for schedule in (*_WITH_TABLE, *_BY_FORMULA):
            yield _estimate(schedule, layout, count, microbatches, assumed)


def times(layout: Layout, replicas: int, assumed: Assumptions) -> tuple[StageCosts, float, float]:
    """Seconds of one micro-batch of one sequence on a stage and of an update; of a transfer; of the reduction."""
    rate = assumed.flops * assumed.utilization
    share = layout.tensor * layout.stages
    forward = 2 * layout.active * layout.sequence / share / rate
    # Causal attention: query by key and scores by value, half of each.
    forward += 2 * layout.sequence**2 * layout.hidden * layout.layers / share / rate
    # Five Newton-Schulz steps of three products each are about 30 x smaller side operations for each parameter; whole
    # matrices are dealt out to the replicas that hold the same ones.
    sharers = max(1, replicas // layout.expert_ranks)
    update = 30 * layout.smaller_side * layout.local_parameters / sharers / rate
    transfer = 2 * layout.sequence * layout.hidden / layout.tensor / assumed.stage_bandwidth
    reduction = 2 * 4 * layout.local_parameters / assumed.reduce_bandwidth if sharers > 1 else 0.0
    return StageCosts(forward, 2 * forward, update), transfer, reduction


def _estimate(schedule: str, layout: Layout, devices: int, microbatches: int, assumed: Assumptions) -> Estimate:
    replicas = devices // (layout.tensor * layout.stages)
    costs, transfer, reduction = times(layout, replicas, assumed)
    compute = microbatches * (costs.forward + costs.backward) + costs.update
    if problem := _problem(schedule, layout.stages, microbatches):
        return Estimate(schedule, devices, microbatches, problem=problem)
    if schedule in _BY_FORMULA:
        rho, live = _formula(schedule, layout.stages, microbatches, costs)
        step = microbatches * (costs.forward + costs.backward) * (1 + rho) + reduction + costs.update
    else:
        step, live = _simulated(schedule, layout.stages, microbatches, costs, transfer, reduction)
    return Estimate(
        schedule,
        devices,
        microbatches,
        step_s=step,
        bubble=max(0.0, 1.0 - compute / step),
        tokens_per_s=layout.batch * layout.sequence / step,
        memory_gb=_memory(schedule, layout, replicas, live, assumed) / 1e9,
    )


def _problem(schedule: str, stages: int, microbatches: int) -> str:
    """Why there is no estimate; "" where there is one."""
    if schedule in _BY_FORMULA:
        return "" if microbatches >= stages else f"the formula holds for M >= {stages}"
    least = SCHEDULES[schedule].least_microbatches(stages)
    return "" if microbatches >= least else f"the schedule needs M >= {least}"


def _simulated(
    schedule: str, stages: int, microbatches: int, costs: StageCosts, transfer: float, reduction: float
) -> tuple[float, float]:
    """Seconds per batch in steady state, from what two more batches add; most live activations of a stage."""
    short, long = (
        simulate(make_schedule(schedule, stages, microbatches, batches), costs, transfer=transfer, reduction=reduction)
        for batches in (3, 5)
    )
    return (long.makespan - short.makespan) / 2, max(long.live_activations)


def _formula(schedule: str, stages: int, microbatches: int, costs: StageCosts) -> tuple[float, float]:
    """Bubble over compute, and live activations in units of a stage (arXiv 2412.19437, table 2; 2104.04473)."""
    of_one = MicroBatchCosts(costs.forward, costs.backward, costs.forward)
    match schedule:
        case "interleaved-1f1b":
            return interleaved_bubble(stages, microbatches, 2), stages * (1 + (stages - 1) / (2 * stages))
        case "zb1p":
            return zb1p_bubble(stages, microbatches, of_one), stages
    return dualpipe_bubble(stages, microbatches, of_one), stages + 1


def _memory(schedule: str, layout: Layout, replicas: int, live: float, assumed: Assumptions) -> float:
    """Bytes on one device: bf16 weights, fp32 gradients; fp32 master weights and momentum spread over the replicas."""
    local, sharers = layout.local_parameters, max(1, replicas // layout.expert_ranks)
    copies = _weight_copies(schedule, layout.stages)
    generations = 2.0 if copies > 1 else 1.0
    corrected = 1.0 if schedule.startswith("2bw") else 0.0
    layers = math.ceil(layout.layers / layout.stages)
    activations = assumed.activation_bytes * layout.sequence * layout.hidden / layout.tensor * layers * live
    return local * (2 * copies + 4 * generations + (8 + 4 * corrected) / sharers) + activations


def _weight_copies(schedule: str, stages: int) -> float:
    """Copies of its weights on the first stage."""
    if schedule in _BY_FORMULA:
        return 2.0 if schedule == "dualpipe" else 1.0
    return SCHEDULES[schedule].weight_copies(stages, 0)


def report(assumed: Assumptions, devices: Sequence[int] = DEVICES) -> str:
    """All layouts as Markdown."""
    parts = [
        "Simulated, not measured. Assumptions: "
        f"{assumed.flops / 1e12:.0f} TFLOP/s bf16 per device at {assumed.utilization:.0%} utilization inside a stage; "
        "backward = 2 x forward; one sequence per micro-batch; "
        f"{assumed.stage_bandwidth / 1e9:.0f} GB/s between stages and "
        f"{assumed.reduce_bandwidth / 1e9:.0f} GB/s per device for the gradient reduction, which the synchronous "
        "schedules do not hide and the delayed ones do; expert all-to-all inside the utilization; Muon; bf16 weights, "
        "fp32 gradients, fp32 master weights and momentum spread over the replicas of a parameter; "
        f"{assumed.activation_bytes:.0f} bytes per layer, token and hidden channel of activations, nothing recomputed. "
        "1f1b, 2bw and 2bw-eager (both with error feedback) and wpipe are simulated from their tables; "
        "interleaved-1f1b (two virtual stages), zb1p and dualpipe follow the formulas in arXiv 2104.04473 and "
        "2412.19437.\n"
    ]
    for layout in LAYOUTS:
        found = list(estimates(layout, devices, assumed))
        parts.append(
            f"**{layout.name}** (tensor {layout.tensor}, {layout.stages} stages, {layout.expert_ranks} expert ranks, "
            f"{layout.local_parameters / 1e9:.2f}B parameters per device, {layout.batch} sequences of "
            f"{layout.sequence} tokens per step; {layout.source})\n"
        )
        parts.append(_table(found))
    return "\n".join(parts)


def _table(found: Sequence[Estimate]) -> str:
    lines = [
        "| devices | M | schedule | step | bubble | tokens/s | memory per device |",
        "| ---: | ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for item in found:
        start = f"| {item.devices} | {item.microbatches} | {item.schedule} |"
        if item.problem:
            lines.append(f"{start} no row: {item.problem} | | | |")
        else:
            lines.append(
                f"{start} {item.step_s:.2f} s | {item.bubble:.1%} | {item.tokens_per_s / 1e6:.2f}M | "
                f"{item.memory_gb:.0f} GB |"
            )
    return "\n".join(lines) + "\n"
