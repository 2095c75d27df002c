# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Profiles of some batches (`--profile`), the memory history of a GPU (`--record-memory-history`), and the timeline of
a run (`--trace-file`) in Chrome trace format (chrome://tracing, Perfetto)."""

import argparse
import json
import pickle
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.utils import configure_nvtx_profiling

from megatron_async.files import write_atomically
from megatron_async.training.callbacks import Callback, CompletedBatch

if TYPE_CHECKING:
    from megatron_async.training.loop import Loop


class Profiler(Callback):
    """Profiles batches from `--profile-step-start` up to, not including, `--profile-step-end`, both counted from 0.

    With `--use-pytorch-profiler` a Chrome trace of each rank, else a window for Nsight Systems. Both ends are drains,
    and this is the last callback: torch's profiler crashes if an operation that it saw begin ends after it, such as a
    receive of gloo's or a sum for the log.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._window: ExitStack | None = None
        self._over = bool(args.profile_ranks) and args.rank not in args.profile_ranks

    def on_train_begin(self, loop: "Loop") -> None:
        super().on_train_begin(loop)
        self.on_drain()

    def on_drain(self) -> None:
        args, batch = self._args, self.loop.args.iteration
        if batch >= args.profile_step_end:
            self._end()
        if not self._over and self._window is None and args.profile_step_start <= batch < args.profile_step_end:
            self._window = ExitStack()
            self._window.enter_context(self._trace() if args.use_pytorch_profiler else self._nsight(self._window))

    def on_train_end(self, complete: bool) -> None:
        if complete:
            self._end()

    def _end(self) -> None:
        self._over = True
        window, self._window = self._window, None
        if window is not None:
            window.close()

    def _trace(self) -> Any:
        args = self._args
        folder = Path(args.tensorboard_dir or args.save or ".").parent / "torch_profile"
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"rank-{args.rank}.json.gz"
        activities = [torch.profiler.ProfilerActivity.CPU]
        if args.device == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        return torch.profiler.profile(
            activities=activities,
            on_trace_ready=lambda profile: profile.export_chrome_trace(str(file)),
            record_shapes=args.pytorch_profiler_collect_shapes,
            with_stack=args.pytorch_profiler_collect_callstack,
        )

    def _nsight(self, window: ExitStack) -> Any:
        if self._args.nvtx_ranges:
            configure_nvtx_profiling(True)
            window.callback(configure_nvtx_profiling, False)
        torch.cuda.profiler.start()
        window.callback(torch.cuda.profiler.stop)
        return torch.autograd.profiler.emit_nvtx(record_shapes=self._args.record_shapes)


class MemoryHistory(Callback):
    """Writes the memory history of this rank's GPU to `--memory-snapshot-path` at every logged iteration."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args

    def on_train_begin(self, loop: "Loop") -> None:
        torch.cuda.memory._record_memory_history("all")

    def on_batch_end(self, batch: CompletedBatch) -> None:
        if batch.iteration % self._args.log_interval == 0:
            write_atomically(Path(self._args.memory_snapshot_path), pickle.dumps(torch.cuda.memory._snapshot()))


class TraceFile(Callback):
    """Writes `--trace-file` at the end of a run, with times of each host's monotonic clock."""

    def on_train_end(self, complete: bool) -> None:
        """Gather the spans of all ranks; rank 0 writes the file."""
        if not complete:
            return
        timeline = self.loop.timeline
        timeline.busy_since_last()
        gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object((mpu.get_pipeline_model_parallel_rank(), timeline.kept()), gathered, dst=0)
        if gathered is None:
            return
        start = min((span.start for _, spans in gathered for span in spans), default=0.0)
        events = [
            {
                "name": f"{span.kind}{span.labels.get('microbatch', span.labels['batch'])}",
                "ph": "X",
                "ts": (span.start - start) * 1e6,
                "dur": span.duration * 1e6,
                "pid": rank,
                "tid": stage,
                "args": {"kind": span.kind, **span.labels},
            }
            for rank, (stage, spans) in enumerate(gathered)
            for span in spans
        ]
        write_atomically(Path(self.loop.args.trace_file), json.dumps({"traceEvents": events}))
