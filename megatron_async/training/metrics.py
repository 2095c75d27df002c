# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Collects the numbers of each batch as they arrive and logs complete batches in order; the pipeline never waits."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_async.platform.host import ReducedValues
from megatron_async.training.callbacks import Callback, CompletedBatch
from megatron_async.training.faults import LossSpikes, samples
from megatron_async.training.log import Log, Row


@dataclass(frozen=True, slots=True)
class Scale:
    """Constants that turn a batch and its time into rates."""

    global_batch_size: int
    seq_length: int
    flops_per_batch: float
    devices: int

    @property
    def tokens(self) -> int:
        """Tokens of a batch."""
        return self.global_batch_size * self.seq_length


class PendingLoss:
    """The loss of a batch, summed over data-parallel ranks in the background.

    Args:
        parts: Megatron's report of each micro-batch: sum of token losses and number of tokens, [2].
        group: data-parallel group.
    """

    def __init__(self, parts: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        sums = torch.stack([part.view(-1) for part in parts]).double().sum(dim=0)
        work = dist.all_reduce(sums, group=group, async_op=True) if group.size() > 1 else None
        self._sums = ReducedValues(sums, work)

    @property
    def ready(self) -> bool:
        return self._sums.ready

    def read(self) -> float:
        """Token-weighted mean loss; waits if it must."""
        total, tokens = self._sums.read()
        return total / tokens if tokens else 0.0


class Metrics(Callback):
    """Logs every batch once all of its numbers are here. On ranks without a log it only keeps collectives in step.

    Args:
        scale: constants of the run.
        group: data-parallel group, which the loss is averaged over.
        log: of the logging rank; None on the others.
        first_iteration: completed batches before this run.
    """

    def __init__(self, *, scale: Scale, group: dist.ProcessGroup, log: Log | None, first_iteration: int) -> None:
        self._scale, self._group, self._log = scale, group, log
        self._losses: dict[int, PendingLoss] = {}
        self._batches: deque[CompletedBatch] = deque()
        self._consumed_tokens = first_iteration * scale.tokens
        self._spikes = LossSpikes()

    def on_losses(self, batch: int, losses: Sequence[dict[str, torch.Tensor]]) -> None:
        self._losses[batch] = PendingLoss([part["lm loss"] for part in losses], self._group)

    def on_batch_end(self, batch: CompletedBatch) -> None:
        self._batches.append(batch)
        self._flush(wait=False)

    def on_drain(self) -> None:
        self._flush(wait=True)

    def on_evaluation_end(self, iteration: int, loss: float | None) -> None:
        if self._log is not None and loss is not None:
            self._log.validation(iteration, loss)

    def on_note(self, text: str) -> None:
        if self._log is not None:
            self._log.say(f" {text}")

    def on_train_end(self, complete: bool) -> None:
        self._flush(wait=complete)
        if self._log is not None:
            self._log.close()

    def _flush(self, *, wait: bool) -> None:
        """Log complete batches; with `wait`, all of them."""
        while self._batches and (wait or self._is_ready(self._batches[0])):
            self._write(self._batches.popleft())

    def _is_ready(self, batch: CompletedBatch) -> bool:
        loss = self._losses.get(batch.number)
        return (loss is None or loss.ready) and all(values.ready for values in batch.pending)

    def _write(self, batch: CompletedBatch) -> None:
        loss = self._losses.pop(batch.number, None)
        self._consumed_tokens += self._scale.tokens
        if self._log is None:
            return
        assert loss is not None, "the logging rank is on the last stage"
        row = self._row(batch, loss.read())
        for values in batch.pending:
            row |= values.read()
        if self._spikes.is_spike(row["lm_loss"]):
            numbers = samples(batch.number, self._scale.global_batch_size)
            self.on_note(f"iteration {batch.iteration}: the loss jumped to {row['lm_loss']:.6E}; samples {numbers}")
        self._log.batch(row)

    def _row(self, batch: CompletedBatch, loss: float) -> Row:
        scale = self._scale
        return {
            "iteration": batch.iteration,
            "consumed_samples": batch.iteration * scale.global_batch_size,
            "consumed_tokens": self._consumed_tokens,
            "lm_loss": loss,
            "grad_norm": batch.grad_norm,
            "learning_rate": batch.learning_rate,
            "iteration_ms": batch.seconds * 1e3,
            "tokens_per_s": scale.tokens / batch.seconds,
            "tflops_per_device": scale.flops_per_batch / batch.seconds / scale.devices / 1e12,
            "bubble_share": batch.bubble_share,
            "skipped": int(batch.skipped),
        }


class LargestLogit(Callback):
    """Logs the largest attention logit of each batch, `max_attention_logit`, before any clip.

    Args:
        group: process group of its own over all ranks; None for one process.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def on_batch_end(self, batch: CompletedBatch) -> None:
        if parts := [report.logits for report in batch.reports if report.logits is not None]:
            batch.pending.append(PendingLogit(parts, self._group))


class PendingLogit:
    """The largest attention logit of a batch over all ranks.

    Args:
        parts: largest logits of this rank's model chunks, any shape.
        group: as of `LargestLogit`.
    """

    def __init__(self, parts: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> None:
        lowest = parts[0].new_full((1,), -math.inf)  # of a rank without softmax attention
        largest = torch.cat([lowest, *(part.flatten() for part in parts)]).max().view(1)
        work = None
        if group is not None:
            work = dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group, async_op=True)
        self._largest = ReducedValues(largest, work)

    @property
    def ready(self) -> bool:
        return self._largest.ready

    def read(self) -> dict[str, Any]:
        return {"max_attention_logit": self._largest.read()[0]}
