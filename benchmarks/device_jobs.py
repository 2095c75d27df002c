# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Jobs of a rank for tools/check_gpu.py, on a GPU or, where there is none, on a CPU."""

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core import mpu
from torch.profiler import ProfilerActivity, profile

from benchmarks import idle, jobs
from megatron_async.config import arguments
from megatron_async.planning.estimate import plan
from megatron_async.training import run
from megatron_async.training.callbacks import Callback, CompletedBatch


@dataclass(frozen=True, slots=True)
class Measured:
    """What a rank measured.

    Attributes:
        batches: milliseconds of each batch.
        idle: shares of its time in steady state.
        peak: most bytes that torch's allocator held on the GPU; 0 without one.
    """

    batches: list[float]
    idle: idle.Shares
    peak: int


def train(line: Sequence[str], steady: tuple[int, int], trace: Path | None) -> Measured:
    """Train, with a trace file of all batches.

    Args:
        steady: first batch, and the one behind the last, of which idle time is looked at.
        trace: folder for a profiler trace of these batches; None without a GPU.
    """
    args = arguments.parse(line)
    times, profiler = jobs.Times(), _Profiler(steady)
    if trace is None:
        run.build(args, callbacks=[times]).run()
        spans = [span for span in times.timeline.kept() if steady[0] <= span.labels["batch"] < steady[1]]
        first, last = mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage()
        shares, peak = idle.of_spans(spans, first=first, last=last), 0
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.cuda.reset_peak_memory_stats()
        run.build(args, callbacks=[times, profiler]).run()
        shares, peak = profiler.shares(trace / f"trace_rank{args.rank}.json"), torch.cuda.max_memory_allocated()
    run.close()
    return Measured(times.batches, shares, peak)


def peak_on_cpu(line: Sequence[str]) -> int:
    """Train on a CPU; the most bytes that torch's allocator held at any moment."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        run.build(arguments.parse(line)).run()
        run.close()
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    total = largest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()  # negative for a release
        largest = max(largest, total)
    return largest


def planned(line: Sequence[str], ranks: int) -> list[int]:
    """Job for one process: bytes of each stage, from the planner."""
    os.environ["WORLD_SIZE"] = str(ranks)
    return [sum(held.values()) for held in plan(arguments.parse([*line, "--dry-run"])).bytes_by_kind]


class _Profiler(Callback):
    """Profiles the batches of a range."""

    def __init__(self, steady: tuple[int, int]) -> None:
        self._steady = steady
        self._profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])

    def on_batch_end(self, batch: CompletedBatch) -> None:
        if batch.iteration == self._steady[0]:
            self._profile.start()
        elif batch.iteration == self._steady[1]:
            self._profile.stop()

    def shares(self, file: Path) -> idle.Shares:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(file))
        return idle.of_trace(json.loads(file.read_text(encoding="utf-8"))["traceEvents"])


def steps_of_a_stage(device: str) -> dict[str, dict[str, float]]:
    """Milliseconds of the steps that a delayed schedule adds: on the device, and until the host is free again.

    On a CPU this only shows that the steps run: small tensors, and times that say nothing about a GPU.
    """
    torch.set_float32_matmul_precision("medium")
    layers, width, tokens, repeats = (8, 4096, 8192, 20) if device == "cuda" else (2, 64, 64, 5)
    return {name: _timed(action, repeats) for name, action in _steps(device, layers, width, tokens).items()}


def _timed(action: Callable[[], object], repeats: int) -> dict[str, float]:
    for _ in range(3):
        action()
    whole, host = [], []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        action()
        host.append((time.perf_counter() - start) * 1e3)
        torch.cuda.synchronize()
        whole.append((time.perf_counter() - start) * 1e3)
    return {"ms": statistics.median(whole), "host_ms": statistics.median(host)}


def _steps(device: str, layers: int, width: int, tokens: int) -> Mapping[str, Callable[[], object]]:
    """What is timed: the steps of a stage of four matrices for each layer, by name."""
    from megatron_async.optim.algorithms.muon import orthogonalize
    from megatron_async.pipeline.pointers import ParameterPointer
    from megatron_async.pipeline.weights import WeightVersions
    from megatron_async.platform.host import HostValues

    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * layers
    weights = [torch.nn.Parameter(torch.randn(shape, device=device, dtype=torch.bfloat16)) for shape in shapes]
    gradients = [torch.randn(shape, device=device) for shape in shapes]
    source = torch.randn(tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    versions = WeightVersions([ParameterPointer(weight) for weight in weights], limit=2)

    def publish() -> None:
        newest = versions.newest
        versions.open_next()
        versions.publish_next(newest + 1)

    def forward_and_backward() -> None:
        linear, x = torch.nn.functional.linear, source
        for to_qkv, merge, widen, narrow in zip(*(weights[start::4] for start in range(4)), strict=True):
            x = x + linear(linear(x, to_qkv)[:, :width], merge)
            x = x + linear(torch.nn.functional.gelu(linear(x, widen)), narrow)
        x.float().square().mean().backward()

    def switch() -> None:
        for version in versions.alive:
            versions.use(version)

    publish()
    return {
        "forward and backward of a micro-batch": forward_and_backward,
        "publish a weight version": publish,
        "switch between two versions": switch,
        "clear a generation of gradients": lambda: [gradient.zero_() for gradient in gradients],
        "norm on its way to the host": lambda: HostValues(torch.nn.utils.get_total_norm(gradients).view(1)),
        "Newton-Schulz of all matrices": lambda: [orthogonalize(gradient) for gradient in gradients],
    }
