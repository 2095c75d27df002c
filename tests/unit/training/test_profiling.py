# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Windows for Nsight Systems and memory histories, with a stand-in for CUDA's functions."""

import argparse
import gzip
import json
import pickle
from contextlib import nullcontext
from types import SimpleNamespace

import torch

from megatron_async.training.profiling import MemoryHistory, Profiler
from megatron_async.training.values import Logged, memory


def run(callback, iterations):
    """A run with these drains."""
    loop = SimpleNamespace(args=SimpleNamespace(iteration=iterations[0]))
    callback.on_train_begin(loop)
    for loop.args.iteration in iterations[1:]:
        callback.on_drain()
    callback.on_train_end(True)


def test_the_window_opens_and_closes_once(monkeypatch):
    calls: list[str] = []
    for name in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, name, lambda name=name: calls.append(name))
    monkeypatch.setattr(torch.autograd.profiler, "emit_nvtx", lambda record_shapes: nullcontext())
    args = argparse.Namespace(
        **{"profile_step_start": 2, "profile_step_end": 4, "use_pytorch_profiler": False, "nvtx_ranges": False},
        **{"record_shapes": False, "profile_ranks": [], "rank": 1},
    )
    for batches, expected in ((range(6), ["start", "stop"]), (range(3), ["start", "stop"]), (range(5, 8), [])):
        calls.clear()
        run(Profiler(args), batches)
        assert calls == expected
    for args.profile_ranks, expected in (([1], ["start", "stop"]), ([0], [])):
        calls.clear()
        run(Profiler(args), range(6))
        assert calls == expected


def test_a_trace_of_the_window_is_written(tmp_path):
    """In one process and one thread; `--use-pytorch-profiler` writes it beside the folder of `--tensorboard-dir`."""
    args = argparse.Namespace(
        **{"profile_step_start": 1, "profile_step_end": 2, "use_pytorch_profiler": True, "rank": 3, "device": "cpu"},
        **{"tensorboard_dir": str(tmp_path / "board"), "save": None, "profile_ranks": []},
        **{"pytorch_profiler_collect_shapes": False, "pytorch_profiler_collect_callstack": False},
    )
    profiler, loop = Profiler(args), SimpleNamespace(args=SimpleNamespace(iteration=0))
    profiler.on_train_begin(loop)
    for loop.args.iteration, operation in enumerate((torch.sin, torch.cos, torch.tan), 1):
        operation(torch.ones(3))
        profiler.on_drain()
    profiler.on_train_end(True)
    events = json.loads(gzip.decompress((tmp_path / "torch_profile" / "rank-3.json.gz").read_bytes()))["traceEvents"]
    names = {event.get("name") for event in events}
    assert "aten::cos" in names and not names & {"aten::sin", "aten::tan"}


def test_memory_counters_are_logged(monkeypatch):
    """`--log-memory-to-tensorboard`."""
    counters = {"reserved_bytes.all.current": 4, "allocated_bytes.all.current": 3}
    counters |= {"allocated_bytes.all.peak": 5, "allocation.all.current": 2}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: counters)
    batch = SimpleNamespace(values={})
    Logged(memory).on_batch_end(batch)
    assert batch.values["mem_max_allocated_bytes"] == 5 and len(batch.values) == 4


def test_memory_histories_are_written_at_logged_iterations(monkeypatch, tmp_path):
    recorded: list[object] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", recorded.append)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"segments": len(recorded)})
    file = tmp_path / "snapshot.pickle"
    history = MemoryHistory(argparse.Namespace(log_interval=2, memory_snapshot_path=str(file)))
    history.on_train_begin(SimpleNamespace())
    history.on_batch_end(SimpleNamespace(iteration=1))
    assert recorded == ["all"] and not file.exists()
    history.on_batch_end(SimpleNamespace(iteration=2))
    assert pickle.loads(file.read_bytes()) == {"segments": 1}
