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
    ],
)
def test_batches_that_grow(steps, expected):
    args = argparse.Namespace(
        micro_batch_size=1,
        data_parallel_size=1,
        pipeline_model_parallel_size=2,
        pipeline_schedule="2bw",
        step_batch_size_schedule=steps,
        seq_length=16,
        gradient_delay=None,
    )
    problems = list(rules.derived_problems(args))
    assert len(problems) == len(expected) and all(text in found for text, found in zip(expected, problems, strict=True))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, []),
        (
            {"global_batch_size": 9},
            ["--global-batch-size 9 is not a multiple of --micro-batch-size 2 x data-parallel size 2 = 4. Take 8 or"],
        ),
        ({"global_batch_size": 3}, ["data-parallel size 2 = 4. Take 4, another --micro-batch-size,"]),
        ({"step_batch_size_schedule": "0:4,64:7"}, ["--global-batch-size 7 is not a multiple of"]),
        ({"eval_micro_batch_size": 3}, ["--global-batch-size 8 is not a multiple of --eval-micro-batch-size 3 x"]),
        ({"eval_global_batch_size": 6}, ["--eval-global-batch-size 6 is not a multiple of --micro-batch-size 2 x"]),
        ({"eval_global_batch_size": 6, "eval_micro_batch_size": 1}, []),
        ({"global_batch_size": None}, []),
        ({"micro_batch_size": None}, []),
    ],
)
def test_a_batch_is_whole_microbatches(given, expected):
    values = {
        "world_size": 4,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 2,
        "context_parallel_size": 1,
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "eval_micro_batch_size": None,
        "eval_global_batch_size": None,
        "seq_length": 16,
    }
    problems = list(rules._whole_microbatches(argparse.Namespace(**(values | given))))
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
