# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Every batch size of a run must fit its schedule."""

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
