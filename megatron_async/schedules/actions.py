# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A pipeline schedule as data: a list of actions for every rank.

There are four actions; sends and receives follow from the forwards and backwards. Micro-batches are numbered through
all batches of a run: with M micro-batches per optimizer step, micro-batch i belongs to batch i // M. Weight version v
is the weights after v optimizer steps; version 0 is the initial weights.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

VersionRule = Callable[[int], int]
"""Batch number -> weight version for forward and backward of that batch."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Forward or backward of one micro-batch through one chunk, with the weights of `version`.

    Attributes:
        due: at an end of a ring of stages, how many receives of messages that come round are to be posted before it,
            counted from the start of the segment.
    """

    kind: ClassVar[str]
    chunk: int
    microbatch: int
    version: int
    due: int = field(default=0, compare=False, repr=False)

    @property
    def number(self) -> int:
        return self.microbatch

    def __str__(self) -> str:
        return f"{self.kind}{self.chunk}.{self.microbatch}@v{self.version}"


class Forward(Compute):
    """Forward of one micro-batch."""

    __slots__ = ()
    kind = "F"


class Backward(Compute):
    """Backward of one micro-batch, with the version of its forward."""

    __slots__ = ()
    kind = "B"


@dataclass(frozen=True, slots=True)
class BatchAction:
    """Reduction or update of one batch on one chunk."""

    kind: ClassVar[str]
    chunk: int
    batch: int

    @property
    def number(self) -> int:
        return self.batch

    def __str__(self) -> str:
        return f"{self.kind}{self.chunk}.{self.batch}"


class Reduce(BatchAction):
    """All gradients of the batch are complete: start their reductions without waiting."""

    __slots__ = ()
    kind = "R"


class Update(BatchAction):
    """Finish the reductions, clip, step, and publish version `batch + 1`."""

    __slots__ = ()
    kind = "U"


Action = Forward | Backward | Reduce | Update


def stale_versions(delay: int) -> VersionRule:
    """Batch b uses W_(b-delay), or W_0 for the first batches."""
    return lambda batch: max(batch - delay, 0)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A complete table.

    Attributes:
        name: name in the registry.
        stages: number P of pipeline ranks.
        microbatches: number M of micro-batches per batch.
        batches: number of batches in the table.
        first_batch: number of the first batch; the pipe is empty before it.
        chunks: virtual stages per rank. Virtual stage chunk * P + rank holds the layers in model order.
        actions: the actions of each rank, in order.
        versions: rule of weight versions, `versions[rank][chunk]`.
        version_limits: most weight versions alive at once, `version_limits[rank][chunk]`.
        microbatches_per_update: micro-batches per optimizer step: M, but 1 for the original PipeDream. The batch
            numbers of R, U and the version rules count optimizer steps.
        reduction_across_ranks: whether an update waits for the reductions of all ranks (global gradient norm) or
            only of its own rank.
    """

    name: str
    stages: int
    microbatches: int
    batches: int
    first_batch: int
    chunks: int
    actions: tuple[tuple[Action, ...], ...]
    versions: tuple[tuple[VersionRule, ...], ...]
    version_limits: tuple[tuple[int, ...], ...]
    microbatches_per_update: int
    reduction_across_ranks: bool = True

    @property
    def microbatch_range(self) -> range:
        """Numbers of the micro-batches."""
        return range(self.first_batch * self.microbatches, (self.first_batch + self.batches) * self.microbatches)

    @property
    def update_range(self) -> range:
        """Numbers of the optimizer steps, as R and U count them."""
        numbers, size = self.microbatch_range, self.microbatches_per_update
        return range(numbers.start // size, numbers.stop // size)

    def batch_of(self, microbatch: int) -> int:
        """Number of the optimizer step of a micro-batch."""
        return microbatch // self.microbatches_per_update

    def virtual_stage(self, rank: int, chunk: int) -> int:
        """Position of a chunk in the model, 0 .. chunks * stages - 1."""
        return chunk * self.stages + rank

    def place_of(self, virtual_stage: int) -> tuple[int, int]:
        """Rank and chunk of a virtual stage."""
        return virtual_stage % self.stages, virtual_stage // self.stages
