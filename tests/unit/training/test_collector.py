# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""When Python collects and when memory is freed: `--manual-gc --manual-gc-interval --no-manual-gc-eval`,
`--empty-unused-memory-level`."""

import argparse
import gc

import pytest
import torch

from megatron_async.training.callbacks import CompletedBatch
from megatron_async.training.collector import EmptyCache, ManualCollection


@pytest.mark.parametrize(
    ("interval", "around", "expected"), [(2, True, [2, 2, 0]), (0, True, [2, 0]), (2, False, [2, 2])]
)
def test_collections(monkeypatch, interval, around, expected):
    found = []
    monkeypatch.setattr(gc, "collect", lambda generation=2: found.append(generation))
    callback = ManualCollection(argparse.Namespace(manual_gc_interval=interval, manual_gc_eval=around))
    callback.on_train_begin(None)
    try:
        assert not gc.isenabled()
        for number in range(3 if around else 4):
            callback.on_batch_end(CompletedBatch(number, [], 0.0, 1.0, None))
        callback.on_evaluation_begin(3)
        callback.on_evaluation_end(3, None)
    finally:
        callback.on_train_end(True)
    assert gc.isenabled() and found == expected


@pytest.mark.parametrize(("schedule", "expected"), [("1f1b", "bbbe"), ("2bw", "dde")])
def test_free_memory_is_returned_outside_a_full_pipeline(monkeypatch, schedule, expected):
    """Three batches in two segments, then an evaluation."""
    found, now = [], ""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: found.append(now))
    callback = EmptyCache(argparse.Namespace(pipeline_schedule=schedule, gradient_delay=None))
    for batches in ([0, 1], [2]):
        for number in batches:
            now = "b"
            callback.on_batch_end(CompletedBatch(number, [], 0.0, 1.0, None))
        now = "d"
        callback.on_drain()
    callback.on_evaluation_begin(3)
    now = "e"
    callback.on_evaluation_end(3, None)
    assert "".join(found) == expected
