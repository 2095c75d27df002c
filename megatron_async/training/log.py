# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Outputs of the logging rank: metrics file, log line, TensorBoard, wandb; progress.txt of rank 0."""

import argparse
import math
import os
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_async.files import JsonLines, read_json_lines
from megatron_async.training.callbacks import Callback

if TYPE_CHECKING:
    from megatron_async.training.loop import Loop

Row = dict[str, Any]
"""The values of a batch by their names in the metrics file."""

_ROUTER_LOSSES = ("load_balancing_loss", "seq_load_balancing_loss", "global_load_balancing_loss", "z_loss")
_COUNTERS = "world_size mem_reserved_bytes mem_allocated_bytes mem_max_allocated_bytes mem_allocated_count".split()
# Name in the metrics file -> name in TensorBoard and wandb, text in the log. Times are in seconds there, as Megatron's.
_SHOWN = {
    "consumed_samples": (None, "consumed samples: {:12d}"),
    "iteration_ms": ("iteration-time", "elapsed time per iteration (ms): {:.1f}"),
    "tflops_per_device": ("throughput", "throughput per GPU (TFLOP/s/GPU): {:.3f}"),
    "tokens_per_s": ("tokens-per-second", "tokens per second: {:.0f}"),
    "learning_rate": ("learning-rate", "learning rate: {:.6E}"),
    "global_batch_size": (None, "global batch size: {:5d}"),
    "lm_loss": ("lm loss", "lm loss: {:.6E}"),
    **{name: (name, f"{name.replace('_', ' ')}: {{:.6G}}") for name in _ROUTER_LOSSES},
    "expert_imbalance": ("expert_imbalance", "expert imbalance: {:.6G}"),
    "idle_experts": ("idle_experts", "idle experts: {:d}"),
    "grad_norm": ("grad-norm", "grad norm: {:.3f}"),
    "num_zeros": ("num-zeros", "num zeros: {:d}"),
    "params_norm": ("params-norm", "params norm: {:.3f}"),
    "bubble_share": ("pipeline-bubble-share", "pipeline bubble: {:.1%}"),
    "forward_ms": ("forward-compute-time", None),
    "backward_ms": ("backward-compute-time", None),
    "update_ms": ("optimizer-time", None),
    **{name: (name.replace("_", "-"), None) for name in _COUNTERS},
}


class MetricsFile(JsonLines):
    """The metrics file. A resumed run continues it; a new run keeps the one that is there as FILE.old, FILE.old2, ...

    Args:
        path: the file.
        resumed_from: completed batches before this run; later rows are dropped.
        config: first line of a new file.
        complete: whether these are all batches of the run. Its test loss, after the last checkpoint, is written again.
    """

    def __init__(self, path: str, resumed_from: int, config: Mapping[str, Any], *, complete: bool = False) -> None:
        file = Path(path)
        rows: list[dict[str, Any]] = []
        if resumed_from and file.exists():
            rows = [row for row in read_json_lines(file) if row.get("iteration", 0) <= resumed_from]
        elif file.is_file():
            names = (file.with_name(f"{file.name}.old{number}") for number in chain([""], count(2)))
            file.rename(next(name for name in names if not name.exists()))
        if complete:
            rows = [row for row in rows if row.get("iteration") != resumed_from or "test_loss" not in row]
        super().__init__(file, rows or [{"config": config}])


class Log(Callback):
    """Writes batches, evaluations and notes to all outputs.

    Args:
        args: Megatron's arguments.
        metrics_file: or None.
        writer, wandb: TensorBoard's SummaryWriter and the wandb module, or None.
    """

    def __init__(self, args: argparse.Namespace, *, metrics_file: MetricsFile | None, writer: Any, wandb: Any) -> None:
        self._args, self._file, self._writer, self._wandb = args, metrics_file, writer, wandb
        self._skipped = self._nan = 0

    def batch(self, row: Row) -> None:
        """Write a batch."""
        self._skipped += row["skipped"]
        self._nan += not math.isfinite(row["lm_loss"])
        if self._file is not None:
            self._file.write(row)
        if row["iteration"] % getattr(self._args, "tensorboard_log_interval", 1) == 0:
            self._to_writers(self._scalars(row), row["iteration"])
        if row["iteration"] % self._args.log_interval == 0:
            self.on_note(self._line(row))
        if "stage_compute_ms" in row:
            self.on_note(_stages(row))

    def on_evaluated(self, iteration: int, name: str, loss: float | None) -> None:
        if loss is None:
            return
        names = {"": ("validation", "valid_loss"), "test": ("test", "test_loss")}
        part, key = names.get(name, (f"validation-{name}", f"valid_loss-{name}"))
        if self._file is not None:
            self._file.write({"iteration": iteration, key: loss})
        perplexity = math.exp(min(loss, 20.0))  # in this order nan stays nan
        values = {f"lm loss {part}": loss}
        if self._args.log_validation_ppl_to_tensorboard:
            values[f"lm loss {part} ppl"] = perplexity
        self._to_writers(values, iteration)
        self.on_note(
            f"{part} loss at iteration {iteration} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity:.6E} |"
        )

    def on_note(self, text: str) -> None:
        sys.stdout.write(f" {text}\n")  # in one piece beside the lines of other ranks
        sys.stdout.flush()

    def on_save_begin(self, iteration: int) -> None:
        """Hand over what TensorBoard's writer holds back: a checkpoint must not be ahead of it."""
        if self._writer is not None:
            self._writer.flush()

    def on_train_end(self, complete: bool) -> None:
        if self._file is not None:
            self._file.close()
        if self._writer is not None:
            self._writer.flush()

    def _to_writers(self, values: Mapping[str, float], iteration: int) -> None:
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, iteration)
        if self._wandb is not None:
            self._wandb.log(dict(values), iteration)

    def _scalars(self, row: Row) -> dict[str, float]:
        values = {
            name: row[key] / 1000 if key.endswith("_ms") else row[key]
            for key, (name, _) in _SHOWN.items()
            if name is not None and row.get(key) is not None
        }
        if self._args.moe_per_layer_logging:
            # Megatron numbers layers from 0 in these names.
            values |= {
                f"moe/{name}_layer_{int(layer) - 1}": value
                for layer, balance in row.get("moe_layers", {}).items()
                for name, value in balance.items()
            }
        return values

    def _line(self, row: Row) -> str:
        shown = ((text, row.get(key)) for key, (_, text) in _SHOWN.items() if text is not None)
        parts = [
            f"[{datetime.now():%Y-%m-%d %H:%M:%S}] iteration {row['iteration']:8d}/{self._args.train_iters:8d}",
            *(text.format(value) for text, value in shown if value is not None),
            f"number of skipped iterations: {self._skipped:3d}",
            f"number of nan iterations: {self._nan:3d}",
        ]
        return " | ".join(parts) + " |"


def _stages(row: Row) -> str:
    """Compute of each stage, relative to the slowest."""
    times = row["stage_compute_ms"]
    shares = ", ".join(f"{stage}: {own / max(max(times), 1e-9):.1%}" for stage, own in enumerate(times))
    hint = f" | {row['stage_hint']}" if "stage_hint" in row else ""
    return f"compute of the stages at iteration {row['iteration']}, of {max(times):.1f} ms | {shares}{hint}"


class ProgressFile(Callback):
    """Appends starts and checkpoints of a run to progress.txt in its `--save` folder, in Megatron's form.

    Args:
        flops: floating-point operations of a sample.
    """

    def __init__(self, flops: float) -> None:
        self._flops = flops

    def on_train_begin(self, loop: "Loop") -> None:
        self._args, self._begin, self._samples = loop.args, time.monotonic(), loop.args.consumed_train_samples
        self._append("Starting job")

    def on_save_end(self, iteration: int) -> None:
        args, seconds = self._args, time.monotonic() - self._begin
        rate = (args.consumed_train_samples - self._samples) * self._flops / seconds / args.world_size / 1e12
        self._append(
            f"{'Saving async' if args.async_save else 'Saved'} checkpoint\tIteration: {iteration}\t"
            f"Job throughput: {rate:.1f} TFLOP/s/GPU\t"
            f"Floating-point operations: {args.consumed_train_samples * self._flops:.2e}\t"
            f"Tokens (in billions): {args.consumed_train_tokens / 1e9:.2f}"
        )

    def _append(self, text: str) -> None:
        job = os.environ.get("SLURM_JOB_ID", "")
        line = f"{datetime.now():%Y-%m-%d %H:%M:%S}\tJob ID: {job}\t# GPUs: {self._args.world_size}\t{text}\n"
        with (Path(self._args.save) / "progress.txt").open("a") as file:
            file.write(line)
