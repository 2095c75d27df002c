# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Rules of schedules: every batch size of a run fits, and each stream of a GPU has a hardware queue."""

import argparse

import pytest

from megatron_async.pipeline import rules


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("0:4,64:8", []),
        ("0:1,64:8", ["1 micro-batches (global batch 1 "]),
        ("0:2,64:7", ["--global-batch-size 7 is not"]),
    ],
)
def test_batches_that_grow(steps, expected):
    micro_batch = 2 if "7" in steps else 1
    args = argparse.Namespace(
        micro_batch_size=micro_batch,
        data_parallel_size=1,
        pipeline_model_parallel_size=2 if micro_batch == 1 else 1,
        pipeline_schedule="2bw" if micro_batch == 1 else "1f1b",
        step_batch_size_schedule=steps,
        seq_length=16,
        gradient_delay=None,
    )
    problems = list(rules.derived_problems(args))
    assert len(problems) == len(expected) and all(text in found for text, found in zip(expected, problems, strict=True))


@pytest.mark.parametrize("queues", ["1", "8", None])
@pytest.mark.parametrize(
    ("schedule", "device", "dry_run", "refused"),
    [("2bw", "cuda", False, True), ("2bw", "cpu", False, False), ("2bw", "cuda", True, False)]
    + [("1f1b", "cuda", False, False)],
)
def test_delayed_schedules_share_no_hardware_queue(monkeypatch, queues, schedule, device, dry_run, refused):
    args = argparse.Namespace(pipeline_schedule=schedule, device=device, dry_run=dry_run)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues) if queues else monkeypatch.delenv(
        "CUDA_DEVICE_MAX_CONNECTIONS", raising=False
    )
    found = list(rules._hardware_queues(args))
    assert bool(found) == refused
    assert all(f"CUDA_DEVICE_MAX_CONNECTIONS={queues or 8}" in one and "needs 32" in one for one in found)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    assert list(rules._hardware_queues(args)) == []
