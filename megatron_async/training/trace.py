# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The timeline of a run in Chrome trace format (chrome://tracing, Perfetto)."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from megatron.core import mpu

from megatron_async.files import write_atomically
from megatron_async.training.callbacks import Callback

if TYPE_CHECKING:
    from megatron_async.training.loop import Loop


class TraceFile(Callback):
    """Writes `--trace-file` at the end of a run, with times of each host's monotonic clock."""

    def on_train_begin(self, loop: "Loop") -> None:
        self._path, self._timeline = Path(loop.args.trace_file), loop.timeline

    def on_train_end(self, complete: bool) -> None:
        """Gather the spans of all ranks; rank 0 writes the file."""
        if not complete:
            return
        self._timeline.busy_since_last()
        gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object((mpu.get_pipeline_model_parallel_rank(), self._timeline.kept()), gathered, dst=0)
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
        write_atomically(self._path, json.dumps({"traceEvents": events}))
