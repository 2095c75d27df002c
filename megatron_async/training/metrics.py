# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""What a run tells about itself: the metrics file, the log line, tensorboard, wandb, the progress bar.

A batch's numbers become known at different times and in the background. `Metrics` collects them by batch and writes
a batch out when all are there, in order; it never makes the pipeline wait.
"""

import math
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megatron_async.files import JsonLines, read_json_lines
from megatron_async.pipeline.host import ReducedValues
from megatron_async.training.faults import LossSpikes, samples


@dataclass(frozen=True, slots=True)
class Scale:
    """Constants that turn a batch and its time into rates."""

    global_batch_size: int
    seq_length: int
    flops_per_batch: float
    devices: int
    train_iters: int


# Of models with experts: their log line, tensorboard and wandb have Megatron's names for the losses.
_BALANCE = (
    "load_balancing_loss",
    "seq_load_balancing_loss",
    "global_load_balancing_loss",
    "z_loss",
    "expert_imbalance",
    "idle_experts",
)


class PendingLoss:
    """A batch's loss, summed over data-parallel ranks in the background.

    Args:
        parts: Megatron's reports of the micro-batches: sum of token losses and number of tokens.
        group: data-parallel group.
    """

    def __init__(self, parts: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        sums = torch.stack([part.view(-1) for part in parts]).double().sum(dim=0)
        work = dist.all_reduce(sums, group=group, async_op=True) if group.size() > 1 else None
        self._sums = ReducedValues(sums, work)

    @property
    def ready(self) -> bool:
        return self._sums.ready

    def read(self) -> tuple[float, float]:
        """Token-weighted mean loss and the number of tokens; waits if it must."""
        total, tokens = self._sums.read()
        return (total / tokens if tokens else 0.0), tokens


class Pending(Protocol):
    """Further values of a batch, on their way."""

    @property
    def ready(self) -> bool:
        """Whether `read` would not wait."""

    def read(self) -> Mapping[str, Any]:
        """The values by their names in the metrics file."""


class PendingLargestLogit:
    """The largest attention logit of a batch, on its way over all ranks.

    Args:
        parts: largest logits of this rank's model chunks, any shape.
        group: process group of its own over all ranks; None for a single one.
    """

    def __init__(self, parts: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> None:
        lowest = parts[0].new_full((1,), -torch.inf)  # of a rank without softmax attention
        largest = torch.cat([lowest, *(part.flatten() for part in parts)]).max().view(1)
        work = None
        if group is not None:
            work = dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group, async_op=True)
        self._largest = ReducedValues(largest, work)

    @property
    def ready(self) -> bool:
        return self._largest.ready

    def read(self) -> Mapping[str, Any]:
        """`max_attention_logit`, under the batch's weights, before any clip."""
        return {"max_attention_logit": self._largest.read()[0]}


@dataclass(frozen=True, slots=True)
class KnownValues:
    """Values that are here already."""

    values: Mapping[str, Any]
    ready: bool = True

    def read(self) -> Mapping[str, Any]:
        return self.values


@dataclass(frozen=True, slots=True)
class BatchNumbers:
    """A completed batch, without its loss."""

    iteration: int
    grad_norm: float
    learning_rate: float
    skipped: bool
    elapsed: float
    bubble_share: float | None


class MetricsFile(JsonLines):
    """The metrics file of a run; continued where the run resumes.

    Args:
        path: the file.
        resumed_from: completed batches before this run; later rows, from a run that did not save, are dropped.
        config: first line of a new file.
    """

    def __init__(self, path: str, resumed_from: int, config: Mapping[str, Any]) -> None:
        file = Path(path)
        before = read_json_lines(file) if resumed_from and file.exists() else []
        rows = [row for row in before if row.get("iteration", 0) <= resumed_from]
        super().__init__(file, rows or [{"config": config}])


class Metrics:
    """The logging rank's log; on other ranks every method is harmless.

    Args:
        scale: constants of the run.
        first_iteration: completed batches before this run.
        metrics_file: None for none, and on every rank but the logging one.
        writer, wandb: tensorboard's SummaryWriter and the wandb module, or None.
        log_interval: batches between log lines.
        log_layers: whether tensorboard and wandb get the experts' balance of each layer too.
        speak: whether this is the logging rank.
    """

    def __init__(
        self,
        *,
        scale: Scale,
        first_iteration: int,
        metrics_file: MetricsFile | None,
        writer: Any,
        wandb: Any,
        log_interval: int,
        log_layers: bool = False,
        speak: bool,
    ) -> None:
        self._scale, self._file, self._writer, self._wandb = scale, metrics_file, writer, wandb
        self._log_interval, self._log_layers, self._speak = log_interval, log_layers, speak
        self._losses: dict[int, PendingLoss] = {}
        self._extras: dict[int, list[Pending]] = {}
        self._batches: deque[BatchNumbers] = deque()
        self._consumed_tokens = first_iteration * scale.global_batch_size * scale.seq_length
        self._skipped = self._nan = 0
        self._spikes = LossSpikes()
        self._progress = self._start_progress(first_iteration) if speak and sys.stdout.isatty() else None

    def loss(self, iteration: int, loss: PendingLoss) -> None:
        """The loss of a batch is on its way."""
        self._losses[iteration] = loss

    def extra(self, iteration: int, values: Pending) -> None:
        """Further values of a batch are on their way; before `batch`."""
        self._extras.setdefault(iteration, []).append(values)

    def batch(self, numbers: BatchNumbers) -> None:
        """A batch is complete; it is written out when its loss has arrived."""
        self._batches.append(numbers)
        self.flush(wait=False)

    def flush(self, *, wait: bool) -> None:
        """Write out complete batches; with `wait`, all of them."""
        while self._batches and (wait or self._is_ready(self._batches[0].iteration)):
            self._write(self._batches.popleft())

    def validation(self, iteration: int, loss: float) -> None:
        """Write an evaluation's result."""
        self.flush(wait=True)
        if not self._speak:
            return
        if self._file is not None:
            self._file.write({"iteration": iteration, "valid_loss": loss})
        if self._writer is not None:
            self._writer.add_scalar("lm loss validation", loss, iteration)
        if self._wandb is not None:
            self._wandb.log({"lm loss validation": loss}, iteration)
        self._say(
            f" validation loss at iteration {iteration} | lm loss value: {loss:.6E} | "
            f"lm loss PPL: {math.exp(min(20.0, loss)):.6E} |"
        )

    def note(self, text: str) -> None:
        """Say something on the logging rank."""
        if self._speak:
            self._say(f" {text}")

    def close(self, *, wait: bool = True) -> None:
        """Write out complete batches and end; do not `wait` where other ranks may never send their part."""
        self.flush(wait=wait)
        if self._progress is not None:
            self._progress.stop()
        if self._file is not None:
            self._file.close()
        if self._writer is not None:
            self._writer.flush()

    def _is_ready(self, iteration: int) -> bool:
        loss = self._losses.get(iteration)
        return (loss is None or loss.ready) and all(extra.ready for extra in self._extras.get(iteration, ()))

    def _write(self, batch: BatchNumbers) -> None:
        pending, extras = self._losses.pop(batch.iteration, None), self._extras.pop(batch.iteration, [])
        if not self._speak:
            return
        assert pending is not None, "the logging rank is on the last stage"
        scale = self._scale
        loss, _ = pending.read()
        self._consumed_tokens += scale.global_batch_size * scale.seq_length
        self._skipped += batch.skipped
        self._nan += not math.isfinite(loss)
        row: dict[str, Any] = {
            "iteration": batch.iteration,
            "consumed_samples": batch.iteration * scale.global_batch_size,
            "consumed_tokens": self._consumed_tokens,
            "lm_loss": loss,
            "grad_norm": batch.grad_norm,
            "learning_rate": batch.learning_rate,
            "iteration_ms": batch.elapsed * 1e3,
            "tokens_per_s": scale.global_batch_size * scale.seq_length / batch.elapsed,
            "tflops_per_device": scale.flops_per_batch / batch.elapsed / scale.devices / 1e12,
            "bubble_share": batch.bubble_share,
            "skipped": int(batch.skipped),
        }
        for extra in extras:
            row |= extra.read()
        if self._file is not None:
            self._file.write(row)
        self._to_writers(row)
        if self._spikes.is_spike(loss):
            numbers = samples(batch.iteration - 1, scale.global_batch_size)
            self._say(f" iteration {batch.iteration}: the loss jumped to {loss:.6E}; samples {numbers}")
        if batch.iteration % self._log_interval == 0:
            self._say(self._line(row))
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=batch.iteration)

    def _to_writers(self, row: Mapping[str, Any]) -> None:
        names = {
            "lm_loss": "lm loss",
            "grad_norm": "grad-norm",
            "learning_rate": "learning-rate",
            "iteration_ms": "iteration-time",
            "tokens_per_s": "tokens-per-second",
            "bubble_share": "pipeline-bubble-share",
        }
        values = {name: row[key] for key, name in names.items() if row[key] is not None}
        values |= {name: row[name] for name in _BALANCE if name in row}
        if self._log_layers:
            # Megatron numbers layers from 0 in these names.
            values |= {
                f"moe/{name}_layer_{int(layer) - 1}": value
                for layer, balance in row.get("moe_layers", {}).items()
                for name, value in balance.items()
            }
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, row["iteration"])
        if self._wandb is not None:
            self._wandb.log(values, row["iteration"])

    def _line(self, row: Mapping[str, Any]) -> str:
        bubble = "" if row["bubble_share"] is None else f" pipeline bubble: {row['bubble_share']:.1%} |"
        balance = "".join(f" {name.replace('_', ' ')}: {row[name]:.6G} |" for name in _BALANCE if name in row)
        return (
            f" [{datetime.now():%Y-%m-%d %H:%M:%S}] iteration {row['iteration']:8d}/{self._scale.train_iters:8d} |"
            f" consumed samples: {row['consumed_samples']:12d} |"
            f" elapsed time per iteration (ms): {row['iteration_ms']:.1f} |"
            f" throughput per GPU (TFLOP/s/GPU): {row['tflops_per_device']:.3f} |"
            f" tokens per second: {row['tokens_per_s']:.0f} |"
            f" learning rate: {row['learning_rate']:.6E} |"
            f" global batch size: {self._scale.global_batch_size:5d} |"
            f" lm loss: {row['lm_loss']:.6E} |{balance} grad norm: {row['grad_norm']:.3f} |{bubble}"
            f" number of skipped iterations: {self._skipped:3d} | number of nan iterations: {self._nan:3d} |"
        )

    def _say(self, text: str) -> None:
        if self._progress is not None:
            self._progress.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    def _start_progress(self, completed: int) -> Progress:
        progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(),
        )
        progress.add_task("training", total=self._scale.train_iters, completed=completed)
        progress.start()
        return progress
