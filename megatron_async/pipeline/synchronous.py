# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Synchronous batches: Megatron-Core's own schedule function, then one optimizer step."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_async.mcore import overlap
from megatron_async.mcore.optimizer import publish_weights
from megatron_async.mcore.parallel import device
from megatron_async.mcore.step import timed_schedule
from megatron_async.optim.step import Part, StepContext, clip_factor, step
from megatron_async.pipeline.steps import History, Training
from megatron_async.pipeline.update import UpdateReport

Losses = list[dict[str, torch.Tensor]]


class SynchronousSteps:
    """Runs batch by batch; every batch is computed with the newest weights.

    Args:
        training: model, optimizer, data.
        optimizer_step: the part of a step in which the optimizer steps.
    """

    def __init__(self, training: Training, optimizer_step: Part = step) -> None:
        self.training = training
        (self.optimizer,) = training.optimizers
        self.iterators = list(training.data_iterators)
        self.logits = training.logit_maxima(training.model)
        self._forward_backward = get_forward_backward_func()
        overlap.set_up(training.args, training.model)
        self._master_step = training.master_step(training.model, self.optimizer, optimizer_step)

    @property
    def histories(self) -> Sequence[History]:
        return []

    def run(self, first_batch: int, batches: int) -> int:
        end = first_batch + batches
        with overlap.gathers_in_forwards(self.training.args, self.training.model):
            for batch in range(first_batch, end):
                stop_after = self._step(batch)
                if stop_after is not None and stop_after < end - 1:
                    end = batch + 1
                    break
        return end - first_batch

    def skip(self, batch: int) -> None:
        self.training.read_past()

    def _step(self, batch: int) -> int | None:
        training = self.training
        biases = [[bias.clone() for bias in group] for group in self.router_biases()]
        training.hooks.action("F", batch)
        if losses := self.gradients(batch):
            training.hooks.losses(batch, losses)
        logits = self._largest_logits(batch)
        training.hooks.action("U", batch)
        with training.timeline.span("U", batch=batch, version=batch + 1, chunk=0):
            skipped, grad_norm = self.update(batch, logits)
            self._restore_biases(biases, skipped)
        shared = torch.tensor(training.hooks.shared(0, batch), dtype=torch.float64, device=device())
        dist.all_reduce(shared)
        return training.hooks.updated(UpdateReport(0, batch, grad_norm, any(skipped), tuple(shared.tolist()), logits))

    def gradients(self, batch: int) -> Losses:
        """Compute the gradients of a batch; return the losses of its micro-batches on the last stage."""
        self.clear_gradients()
        return self.forward_and_backward(batch)

    def update(self, batch: int, logits: torch.Tensor | None) -> tuple[list[bool], float]:
        """Clip and step, unless the gradient is not finite.

        Returns:
            Whether the update was skipped, for each group with a norm of its own (here one), and the L2 norm of the
            gradient before clipping.
        """
        overflow = self.prepare_gradients(batch)
        norm = math.nan if overflow else float(self.optimizer.get_grad_norm())
        if not math.isfinite(norm):
            return [True], math.nan
        self.step(batch, clip_factor(norm, self.training.args.clip_grad), logits)
        return [False], norm

    def prepare_gradients(self, batch: int) -> bool:
        """Hand the gradients to the optimizer; return whether fp16's loss scaler found an overflow."""
        return self.optimizer.prepare_grads()

    def step(self, batch: int, factor: float, logits: torch.Tensor | None) -> None:
        """Step the master weights with gradients scaled by `factor`, and publish them."""
        self._master_step(StepContext(batch, factor, self.training.corrected(batch), logits))
        publish_weights(self.optimizer)

    def router_biases(self) -> list[list[torch.Tensor]]:
        """Buffers that Megatron moves once for each batch to balance the experts, by group of the update."""
        names = (".expert_bias", ".qb_beta")
        chunks = self.training.model
        return [[buffer for chunk in chunks for name, buffer in chunk.named_buffers() if name.endswith(names)]]

    def clear_gradients(self) -> None:
        for chunk in self.training.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def forward_and_backward(self, batch: int) -> Losses:
        """Run Megatron's schedule function over a batch."""
        training = self.training
        if self.logits is not None:
            self.logits.use(batch)
        with timed_schedule(training.timeline, batch, get_num_microbatches()):
            losses: Losses = self._forward_backward(
                forward_step_func=training.forward_step,
                data_iterator=self.iterators if len(training.model) > 1 else self.iterators[0],
                model=training.model,
                num_microbatches=get_num_microbatches(),
                seq_length=training.args.seq_length,
                micro_batch_size=training.args.micro_batch_size,
                decoder_seq_length=training.args.decoder_seq_length,
                forward_only=False,
            )
        return losses

    def _largest_logits(self, batch: int) -> torch.Tensor | None:
        if self.logits is None:
            return None
        if (work := self.logits.reduce(batch)) is not None:
            work.wait()
        return self.logits.take(batch)

    def _restore_biases(self, before: Sequence[Sequence[torch.Tensor]], skipped: Sequence[bool]) -> None:
        """Undo Megatron's change of the router biases where the update was skipped."""
        for group, values, skip in zip(self.router_biases(), before, skipped, strict=True):
            if skip:
                for bias, value in zip(group, values, strict=True):
                    bias.copy_(value)
