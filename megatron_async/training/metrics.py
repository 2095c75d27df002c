# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Collects the values of each batch as they arrive and logs complete batches in order, without blocking training."""

import argparse
from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_async.mcore.batch_sizes import BatchSizes
from megatron_async.platform.host import Reduced
from megatron_async.training.callbacks import Callback, CompletedBatch
from megatron_async.training.faults import LossSpikes
from megatron_async.training.log import Log, Row


def pending_loss(parts: Sequence[torch.Tensor], group: dist.ProcessGroup) -> Reduced[tuple[float, int]]:
    """Token-weighted mean loss of a batch, and its number of tokens, padding left out.

    Args:
        parts: Megatron's report of each micro-batch: sum of token losses and number of tokens, [2].
        group: data-parallel group.
    """

    def mean(sums: list[float]) -> tuple[float, int]:
        total, tokens = sums
        return total / tokens if tokens else 0.0, round(tokens)

    sums = torch.stack([part.view(-1) for part in parts]).double().sum(dim=0)
    return Reduced(sums, group if group.size() > 1 else None, mean)


class Metrics(Callback):
    """Gives every batch to the log once its values have arrived. Other ranks only take part in the reductions.

    Args:
        args: sizes of a batch, number of devices, completed batches. Its `consumed_train_tokens` is counted here, where
            the losses are.
        flops: floating-point operations of a batch of `args.global_batch_size` samples.
        group: data-parallel group, over which the loss is averaged.
        log: of the logging rank; None on the others.
    """

    def __init__(self, args: argparse.Namespace, *, flops: float, group: dist.ProcessGroup, log: Log | None) -> None:
        self._args, self._flops, self._group, self._log = args, flops, group, log
        self._losses: dict[int, Reduced[tuple[float, int]]] = {}
        self._batches: deque[CompletedBatch] = deque()
        self._spikes = LossSpikes()
        self._sizes = BatchSizes.of(args)

    def on_losses(self, batch: int, losses: Sequence[dict[str, torch.Tensor]]) -> None:
        self._losses[batch] = pending_loss([part["lm loss"] for part in losses], self._group)

    def on_batch_end(self, batch: CompletedBatch) -> None:
        self._batches.append(batch)
        self._flush(wait=False)

    def on_drain(self) -> None:
        self._flush(wait=True)

    def on_train_end(self, complete: bool) -> None:
        self._flush(wait=complete)

    def _flush(self, *, wait: bool) -> None:
        """Log complete batches; with `wait`, all batches."""
        while self._batches and (wait or self._is_ready(self._batches[0])):
            batch = self._batches.popleft()
            if (loss := self._losses.pop(batch.number, None)) is not None:
                mean, tokens = loss.read()
                self._args.consumed_train_tokens += tokens
            if self._log is not None:
                assert loss is not None, "the logging rank is on the last stage"
                self._write(self._log, batch, mean, tokens)
            elif wait:  # nothing is in flight after a drain
                for values in batch.pending:
                    values.read()

    def _is_ready(self, batch: CompletedBatch) -> bool:
        loss = self._losses.get(batch.number)
        return (loss is None or loss.ready) and all(values.ready for values in batch.pending)

    def _write(self, log: Log, batch: CompletedBatch, loss: float, tokens: int) -> None:
        args, consumed = self._args, self._sizes.before(batch.iteration)
        size = consumed - self._sizes.before(batch.number)
        row: Row = {
            "iteration": batch.iteration,
            "consumed_samples": consumed,
            "consumed_tokens": args.consumed_train_tokens,
            "global_batch_size": size,
            "lm_loss": loss,
            "loss_tokens": tokens,
            "grad_norm": batch.grad_norm,
            "learning_rate": batch.learning_rate,
            "iteration_ms": batch.seconds * 1e3,
            "tokens_per_s": tokens / batch.seconds,
            "tflops_per_device": size / args.global_batch_size * self._flops / batch.seconds / args.world_size / 1e12,
            "bubble_share": batch.bubble_share,
            "skipped": int(batch.skipped),
            **batch.values,
        }
        for values in batch.pending:
            row |= values.read()
        if self._spikes.is_spike(loss):
            seen = self._sizes.samples(batch.number)
            log.on_note(f"iteration {batch.iteration}: the loss jumped to {loss:.6E}; samples {seen}")
        log.batch(row)
