# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The planner's memory of each schedule beside the peak that torch's allocator counts."""

import os
import shlex
from collections.abc import Sequence

import pytest

from benchmarks.processes import Pool

STAGES = 2
MODEL = f"""--device cpu --num-layers 8 --hidden-size 192 --num-attention-heads 6 --ffn-hidden-size 512 --swiglu
    --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --seq-length 128
    --max-position-embeddings 128 --micro-batch-size 2 --attention-dropout 0 --hidden-dropout 0
    --untie-embeddings-and-output-weights --tokenizer-type NullTokenizer --vocab-size 1023 --mock-data --lr 1e-3
    --eval-iters 0 --eval-interval 1000 --optimizer muon --pipeline-model-parallel-size {STAGES}"""
BATCH = "--train-iters 4 --global-batch-size 8"
VARIANTS = {
    "1f1b": f"--pipeline-schedule 1f1b {BATCH}",
    "2bw, error feedback": f"--pipeline-schedule 2bw --staleness-correction error-feedback {BATCH}",
    "2bw-eager": f"--pipeline-schedule 2bw-eager {BATCH}",
    "wpipe": f"--pipeline-schedule wpipe {BATCH}",
}
MORE_ACTIVATIONS = {"2bw-eager", "wpipe"}
"""Schedules that hold more micro-batches than 1F1B; the planner estimates their activations from below."""


def peak(line: Sequence[str]) -> int:
    """Job: train; return the most bytes that torch's allocator held at any moment."""
    from torch.profiler import ProfilerActivity, profile

    from megatron_async.config import arguments
    from megatron_async.training import run
    from megatron_async.training.signals import StopRequests

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        run.pretrain(arguments.parse(line), StopRequests())
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    total = largest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()  # negative for a release
        largest = max(largest, total)
    return largest


def planned(line: Sequence[str]) -> list[int]:
    """Job for one process: bytes on each stage, from the planner."""
    os.environ["WORLD_SIZE"] = str(STAGES)
    from megatron_async.config import arguments
    from megatron_async.planning.estimate import plan

    return [sum(held.values()) for held in plan(arguments.parse([*line, "--dry-run"])).bytes_by_kind]


def sizes(pool: Pool, variant: str) -> tuple[list[int], list[int]]:
    """Measured and planned bytes of a variant, by stage."""
    line = shlex.split(f"{MODEL} {VARIANTS[variant]}")
    measured = pool.run(f"{__name__}:peak", line, ranks=STAGES)
    return measured, pool.run(f"{__name__}:planned", line, ranks=1)[0]


@pytest.fixture(scope="module")
def synchronous(pool: Pool) -> tuple[list[int], list[int]]:
    return sizes(pool, "1f1b")


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "1f1b"])
def test_a_schedule_adds_to_1f1b_what_the_planner_says(
    pool: Pool, synchronous: tuple[list[int], list[int]], variant: str
) -> None:
    measured, planned = sizes(pool, variant)
    tolerance = 0.07 if variant in MORE_ACTIVATIONS else 0.01
    for stage in range(STAGES):
        predicted = synchronous[0][stage] + planned[stage] - synchronous[1][stage]
        assert measured[stage] == pytest.approx(predicted, rel=tolerance), f"stage {stage}"
