# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The interface of running batches, and what every implementation is made of."""

import argparse
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from megatron.core import mpu
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_async.mcore.optimizer import inner_optimizers
from megatron_async.optim.corrections import Correction
from megatron_async.optim.qk_clip import ClipRule, QkClip, watches_logits
from megatron_async.optim.statistics import UpdateStatistics
from megatron_async.optim.step import MasterStep, Part, parts, step
from megatron_async.optim.totals import GradientZeros
from megatron_async.pipeline.executor import Hooks
from megatron_async.pipeline.logits import LogitMaxima
from megatron_async.pipeline.timeline import Timeline
from megatron_async.schedules.phases import Phases


class History(Protocol):
    """Older weight versions of one model chunk that coming batches are computed with.

    Ages count updates: 1 is the version before the newest. An age that was never reached stands for the oldest known
    version.
    """

    @property
    def depth(self) -> int:
        """The largest age that coming batches need; 0 for none."""

    def showing(self, age: int) -> AbstractContextManager[None]:
        """Let the chunk's parameters and buffers show the storage of that version; restore on exit."""

    def fill(self) -> None:
        """Make every age up to `depth` a copy of the newest weights, with storage of its own."""


class Steps(Protocol):
    """Runs consecutive batches and leaves the newest weights in use."""

    @property
    def histories(self) -> Sequence[History]:
        """Older weights that coming batches need, for each model chunk; none in a synchronous run."""

    def run(self, first_batch: int, batches: int) -> int:
        """Run up to `batches` batches of one size; return how many were run."""

    def skip(self, batch: int) -> None:
        """Read past the data of a batch; its update changes nothing. The pipeline must be empty."""


@dataclass(frozen=True, slots=True)
class Training:
    """What every way to run batches is made of.

    Attributes:
        args: Megatron's arguments and ours.
        model: this rank's wrapped model chunks.
        optimizers: Megatron's optimizer of each chunk; one for all of them in a synchronous run.
        forward_step: Megatron's forward step function.
        data_iterators: micro-batches for each chunk, None where a chunk needs no data.
        phases: which batches are synchronous, which updates are corrected.
        correction: of the delay; None for none.
        statistics: of updates; None for none.
        zeros: counts zeros in gradients; None for no count.
        hooks: the training loop's part.
        timeline: measures the actions.
    """

    args: argparse.Namespace
    model: list[Any]
    optimizers: list[MegatronOptimizer]
    forward_step: Any
    data_iterators: Sequence[Any]
    phases: Phases
    correction: Correction | None
    statistics: UpdateStatistics | None
    zeros: GradientZeros | None
    hooks: Hooks
    timeline: Timeline

    def corrected(self, batch: int) -> bool:
        """Whether the correction applies to the update of a batch."""
        correction = self.correction
        return correction is not None and self.phases.corrected(batch, from_first=correction.from_first_update)

    def read_past(self) -> None:
        """Take the micro-batches of one batch out of the data."""
        for data in self.data_iterators:
            for _ in range(0 if data is None else get_num_microbatches()):
                next(data)

    def master_step(
        self, chunks: Sequence[Any], optimizer: MegatronOptimizer, optimizer_step: Part = step
    ) -> MasterStep:
        """The step of a chunk's optimizer, with every part that the run has."""
        args = self.args
        clip = QkClip(chunks, optimizer, ClipRule(args.qk_clip_threshold, args.qk_clip_alpha)) if args.qk_clip else None
        return MasterStep(
            [inner.optimizer for inner in inner_optimizers(optimizer)],
            parts(
                correction=self.correction,
                statistics=self.statistics,
                qk_clip=clip,
                optimizer_step=optimizer_step,
                zeros=self.zeros,
            ),
        )

    def logit_maxima(self, chunks: Sequence[Any]) -> LogitMaxima | None:
        """The largest attention logits of some chunks, where the run needs them."""
        if not watches_logits(self.args):
            return None
        return LogitMaxima(chunks, mpu.get_data_parallel_group(with_context_parallel=True))
