# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The vocabulary of a pipeline schedule: four actions, the rule of weight versions, and the table.

A schedule is data. For every rank it lists what the rank does, in order; sends and receives follow from
the lists of forwards and backwards. Micro-batches are numbered through all batches of a run, so
micro-batch i belongs to batch i // M (M micro-batches per optimizer step). Weight version v is the
weights after v optimizer steps; version 0 is the initial weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

VersionRule = Callable[[int], int]
"""Batch number -> weight version which that batch is computed with, forward and backward."""


@dataclass(frozen=True, slots=True)
class Forward:
    """Forward of one micro-batch through one chunk, with the weights of `version`."""

    kind: ClassVar[str] = "F"
    chunk: int
    microbatch: int
    version: int

    def __str__(self) -> str:
        return f"F{self.chunk}.{self.microbatch}@v{self.version}"


@dataclass(frozen=True, slots=True)
class Backward:
    """Backward of one micro-batch through one chunk; `version` is the version of its forward."""

    kind: ClassVar[str] = "B"
    chunk: int
    microbatch: int
    version: int

    def __str__(self) -> str:
        return f"B{self.chunk}.{self.microbatch}@v{self.version}"


@dataclass(frozen=True, slots=True)
class Reduce:
    """All gradients of the batch are here: start the reductions, wait for none of them."""

    kind: ClassVar[str] = "R"
    chunk: int
    batch: int

    def __str__(self) -> str:
        return f"R{self.chunk}.{self.batch}"


@dataclass(frozen=True, slots=True)
class Update:
    """The reductions must be done by now: clip, step, publish version `batch + 1`."""

    kind: ClassVar[str] = "U"
    chunk: int
    batch: int

    def __str__(self) -> str:
        return f"U{self.chunk}.{self.batch}"


Compute = Forward | Backward
Action = Forward | Backward | Reduce | Update


def stale_versions(delay: int) -> VersionRule:
    """Batch b is computed with W_(b-delay), with W_0 while there is nothing that old."""
    return lambda batch: max(batch - delay, 0)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A complete table and what is needed to check it.

    Attributes:
        name: name in the registry.
        stages: number P of pipeline ranks.
        microbatches: number M of micro-batches per batch.
        batches: number of batches in the table.
        first_batch: number of the first of them; the pipe is empty before it.
        chunks: virtual stages per rank. Virtual stage chunk * P + rank holds the layers in model order.
        actions: for each rank its actions in order.
        versions: rule of versions for each rank and chunk, `versions[rank][chunk]`.
        version_limits: how many weight versions may be alive at once, `version_limits[rank][chunk]`.
        microbatches_per_update: micro-batches that one optimizer step consumes: M, but 1 for the original
            PipeDream, where every micro-batch is a batch of its own. The batch numbers in the actions and
            the arguments of the version rules count these.
        reduction_across_ranks: whether an update waits for the reductions of all ranks (global gradient
            norm) or for those of its own rank alone.
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
        """Numbers of the micro-batches in the table."""
        first = self.first_batch * self.microbatches
        return range(first, first + self.batches * self.microbatches)

    @property
    def update_range(self) -> range:
        """Numbers of the optimizer steps in the table, as the R and U actions count them."""
        numbers = self.microbatch_range
        return range(numbers.start // self.microbatches_per_update, numbers.stop // self.microbatches_per_update)

    def batch_of(self, microbatch: int) -> int:
        """Number of the optimizer step to which a micro-batch contributes."""
        return microbatch // self.microbatches_per_update

    def virtual_stage(self, rank: int, chunk: int) -> int:
        """Position in the model of a chunk of a rank, 0 .. chunks * stages - 1."""
        return chunk * self.stages + rank

    def place_of(self, virtual_stage: int) -> tuple[int, int]:
        """Rank and chunk which hold a virtual stage."""
        return virtual_stage % self.stages, virtual_stage // self.stages
