# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The planner's memory of each schedule beside the peak that torch's allocator counts."""

import shlex

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
SHARE = 0.04
"""What plans leave out: small tensors, and gradients inside a layer."""
MORE_ACTIVATIONS = {"2bw-eager", "wpipe"}
"""Schedules that hold more micro-batches than 1F1B; the planner leaves small tensors of activations out."""


def sizes(pool: Pool, variant: str) -> tuple[list[int], list[int]]:
    """Measured and planned bytes of a variant, by stage."""
    line = shlex.split(f"{MODEL} {VARIANTS[variant]}")
    measured = pool.run("benchmarks.device_jobs:peak_on_cpu", line, ranks=STAGES, timeout=600)
    return measured, pool.run("benchmarks.device_jobs:planned", line, STAGES, ranks=1)[0]


@pytest.fixture(scope="module")
def synchronous(pool: Pool) -> tuple[list[int], list[int]]:
    return sizes(pool, "1f1b")


def test_1f1b_holds_what_the_planner_says(synchronous: tuple[list[int], list[int]]) -> None:
    measured, planned = synchronous
    assert measured == pytest.approx(planned, rel=SHARE)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "1f1b"])
def test_a_schedule_adds_to_1f1b_what_the_planner_says(
    pool: Pool, synchronous: tuple[list[int], list[int]], variant: str
) -> None:
    measured, planned = sizes(pool, variant)
    assert measured == pytest.approx(planned, rel=SHARE)
    tolerance = 0.04 if variant in MORE_ACTIVATIONS else 0.01
    for stage in range(STAGES):
        predicted = synchronous[0][stage] + planned[stage] - synchronous[1][stage]
        assert measured[stage] == pytest.approx(predicted, rel=tolerance), f"stage {stage}"
