# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Emulated compute: schedules and transport run for real around stages that sleep."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.processes import Pool
from tests.distributed.jobs import BASE
from tools.report import Row, read_metrics

FORWARD, BACKWARD, MICROBATCHES = 15.0, 30.0, 4
COMPUTE = MICROBATCHES * (FORWARD + BACKWARD)
LAYOUT = "--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights --train-iters 8"


def sleep(arguments: Sequence[str]) -> None:
    """Job: a run whose stages sleep."""
    from benchmarks.emulation import SleepingForwardStep
    from megatron_async.config import arguments as command_line
    from megatron_async.schedules import schedule_of
    from megatron_async.training import run

    args = command_line.parse([*BASE, *arguments])
    shape = (args.seq_length, args.micro_batch_size, args.hidden_size)
    step = SleepingForwardStep(FORWARD, BACKWARD, chunks=schedule_of(args).chunks, shape=shape)
    run.build(args, forward_step=step).run()
    run.close()


def train(pool: Pool, schedule: str, folder: Path) -> Sequence[Row]:
    batch, files = 1 if schedule == "pipedream" else MICROBATCHES, f"--metrics-file {folder}/metrics.jsonl"
    arguments = f"{LAYOUT} --pipeline-schedule {schedule} --global-batch-size {batch} {files}"
    pool.run(f"{__name__}:sleep", [*arguments.split(), "--trace-file", str(folder / "trace.json")], ranks=2)
    return read_metrics(folder / "metrics.jsonl").training


@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "wpipe", "pipedream"])
def test_a_batch_takes_as_long_as_its_stages_sleep(pool, schedule, tmp_path):
    """Never less than the sleeps of one rank; no stage computes anything, whatever the schedule."""
    rows = train(pool, schedule, tmp_path)
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
