# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Peak memory of each stage under each schedule, counted, beside what the schedule's table predicts.

Every tensor's bytes are counted by torch's CPU allocator, as the profiler reports it: what is allocated at any moment,
from before the model is built. Process size is not used: it holds libraries and never shrinks.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks.processes import Pool
from benchmarks.training import forward_alone
from megatron_async.config import arguments
from megatron_async.schedules import SCHEDULES, StageCosts, make_schedule, simulate
from megatron_async.training import run

MODEL = """--device cpu --num-layers 8 --hidden-size 192 --num-attention-heads 6 --ffn-hidden-size 512 --swiglu
    --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --seq-length 128
    --max-position-embeddings 128 --micro-batch-size 2 --attention-dropout 0 --hidden-dropout 0
    --untie-embeddings-and-output-weights --tokenizer-type NullTokenizer --vocab-size 1023 --mock-data --lr 1e-3
    --eval-iters 0 --eval-interval 1000 --clip-grad 1.0 --optimizer muon --train-iters 4 --log-interval 100"""

VARIANTS: Mapping[str, str] = {
    "1f1b": "--pipeline-schedule 1f1b",
    "2bw": "--pipeline-schedule 2bw",
    "2bw, error feedback": "--pipeline-schedule 2bw --staleness-correction error-feedback",
    "2bw-eager": "--pipeline-schedule 2bw-eager",
    "wpipe": "--pipeline-schedule wpipe",
    "pipedream": "--pipeline-schedule pipedream",
}
_FP32 = 4


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes on one stage: the most at any moment, and of one copy of its weights."""

    peak: int
    weights: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """One stage under one schedule against 1F1B of the same model, in bytes.

    Attributes:
        predicted: 1F1B's peak, plus what the schedule adds: weight versions, a second generation of gradients, the
            correction's buffer, and the difference in live activations.
        parts: these additions by name.
    """

    schedule: str
    stage: int
    measured: int
    predicted: int
    parts: Mapping[str, int]


def measure(stages: int, microbatches: int) -> list[Comparison]:
    """Run every variant for four batches."""
    with Pool() as pool:
        kept = pool.run("benchmarks.memory:activations", stages, ranks=stages)
        peaks = {
            name: pool.run("benchmarks.memory:peak", variant, stages, microbatches, ranks=stages)
            for name, variant in VARIANTS.items()
        }
    return compare([{name: peaks[name][stage] for name in peaks} for stage in range(stages)], microbatches, kept)


def peak(variant: str, stages: int, microbatches: int) -> Peak:
    """Run a variant for four batches on this rank."""
    count = 1 if "pipedream" in variant else microbatches
    line = f"{MODEL} --pipeline-model-parallel-size {stages} --global-batch-size {2 * count} {variant}"
    if count == 1:
        line += f" --train-iters {4 * stages}"
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        loop = run.build(arguments.parse(shlex.split(line)))
        weights = _FP32 * sum(param.numel() for chunk in loop.model for param in chunk.parameters())
        loop.run()
    loop.metrics.close()
    run.close()
    return Peak(_largest_total(profiler), weights)


def _largest_total(profiler: Any) -> int:
    """Sum up allocations (positive) and releases (negative) in the order of time."""
    total = largest = 0
    for event in _memory_events(profiler):
        total += event.nbytes()
        largest = max(largest, total)
    return largest


def _memory_events(profiler: Any) -> list[Any]:
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return sorted(events, key=lambda event: event.start_ns())


def activations(stages: int) -> int:
    """Bytes that this rank keeps between a micro-batch's forward and its backward."""
    line = f"{MODEL} --pipeline-model-parallel-size {stages} --global-batch-size {2 * stages} {VARIANTS['2bw']}"
    loop = run.build(arguments.parse(shlex.split(line)))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        kept = forward_alone(loop)
    del kept
    loop.metrics.close()
    run.close()
    return sum(event.nbytes() for event in _memory_events(profiler))


def compare(
    ranks: Sequence[Mapping[str, Peak]], microbatches: int, activations_of: Sequence[float]
) -> list[Comparison]:
    """Predicted and measured, for every stage and schedule.

    Args:
        ranks: from `peak`, by stage.
        microbatches: per batch.
        activations_of: bytes of one micro-batch's activations, by stage.
    """
    stages = len(ranks)
    live_1f1b = _live("1f1b", stages, microbatches)
    result = []
    for name in VARIANTS:
        schedule = name.partition(",")[0]
        live = _live(schedule, stages, microbatches)
        for stage, rank in enumerate(ranks):
            weights = rank[name].weights
            parts = {
                "weight versions": int(weights * (SCHEDULES[schedule].weight_copies(stages, stage) - 1)),
                "gradient generation": 0 if schedule == "1f1b" else weights,
                "correction": weights if "error feedback" in name else 0,
                "activations": int((live[stage] - live_1f1b[stage]) * activations_of[stage]),
            }
            predicted = rank["1f1b"].peak + sum(parts.values())
            result.append(Comparison(name, stage, rank[name].peak, predicted, parts))
    return result


def _live(schedule: str, stages: int, microbatches: int) -> tuple[float, ...]:
    count = 1 if schedule == "pipedream" else microbatches
    batches = 4 * stages if count == 1 else 4
    return simulate(make_schedule(schedule, stages, count, batches), StageCosts(1.0, 2.0)).live_activations
