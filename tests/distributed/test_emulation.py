# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Emulated compute: schedules and transport run for real around stages that sleep."""

import json

import pytest

from benchmarks.processes import Pool

FORWARD, BACKWARD, MICROBATCHES = 15.0, 30.0, 4
COMPUTE = MICROBATCHES * (FORWARD + BACKWARD)
LAYOUT = (
    f"--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights --emulate-compute-ms {FORWARD},{BACKWARD}"
)


def train(pool: Pool, schedule: str, folder) -> list[dict]:
    metrics, batch = folder / "metrics.jsonl", 1 if schedule == "pipedream" else MICROBATCHES
    arguments = (
        f"{LAYOUT} --pipeline-schedule {schedule} --global-batch-size {batch} --train-iters 8 --metrics-file {metrics}"
    )
    pool.run("tests.distributed.jobs:train", [*arguments.split(), "--trace-file", str(folder / "trace.json")], ranks=2)
    return [json.loads(line) for line in metrics.read_text().splitlines()]


@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "wpipe", "pipedream"])
def test_a_batch_takes_as_long_as_its_stages_sleep(pool, schedule, tmp_path):
    """Never less than the sleeps of one rank; no stage computes anything, whatever the schedule."""
    config, *rows = train(pool, schedule, tmp_path)
    assert config["config"]["emulated_compute_ms"] == f"{FORWARD},{BACKWARD}"
    compute = COMPUTE / MICROBATCHES if schedule == "pipedream" else COMPUTE
    steady = sum(row["iteration_ms"] for row in rows[2:-2])
    assert steady >= 0.95 * compute * len(rows[2:-2])
    assert all(row["grad_norm"] >= 0 for row in rows)


def test_synchronous_batches_pay_for_filling_and_draining(pool, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    drained = [row["iteration_ms"] for row in train(pool, "1f1b", tmp_path / "a")[3:-2]]
    continuous = [row["iteration_ms"] for row in train(pool, "2bw", tmp_path / "b")[3:-2]]
    assert min(drained) >= (MICROBATCHES + 1) * (FORWARD + BACKWARD)
    assert min(continuous) < (MICROBATCHES + 1) * (FORWARD + BACKWARD)
