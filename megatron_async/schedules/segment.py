# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A segment: consecutive batches between two drains, as one stage plans them."""

from dataclasses import dataclass

from megatron_async.schedules.actions import VersionRule


@dataclass(frozen=True, slots=True)
class Segment:
    """The arguments of a stage's plan.

    Attributes:
        stages: number P of pipeline ranks.
        stage: index of this one.
        microbatches: number M of micro-batches per batch.
        batches: numbers of the batches.
        versions: rule of weight versions of chunk 0; the other chunks follow the schedule's own.
    """

    stages: int
    stage: int
    microbatches: int
    batches: range
    versions: VersionRule

    @property
    def ahead(self) -> int:
        """Stages behind this one, P-1-s: forwards that 1F1B runs before the first backward."""
        return self.stages - 1 - self.stage

    @property
    def micro_batches(self) -> range:
        """Numbers of the micro-batches."""
        return range(self.batches.start * self.microbatches, self.batches.stop * self.microbatches)


def shape_problems(*, stages: int, microbatches: int, batches: int, first_batch: int, stage: int = 0) -> list[str]:
    """Problems with the shape of a table or of a stage's plan."""
    problems = [
        f"{name} = {value}: must be at least 1"
        for name, value in (("stages", stages), ("microbatches", microbatches), ("batches", batches))
        if value < 1
    ]
    if first_batch < 0:
        problems.append(f"first_batch = {first_batch}: must not be negative")
    if not 0 <= stage < max(1, stages):
        problems.append(f"stage = {stage}: must be one of 0 .. {stages - 1}")
    return problems


def overlap_problems(*, name: str, stages: int, microbatches: int, least: int) -> list[str]:
    """Problems with batches that overlap under a delay of one.

    With fewer micro-batches than stage 0 has in flight, backwards of a batch would still be due at the update after
    the next batch: a third weight version would be needed (PipeDream-2BW, arXiv 2006.09503).

    Args:
        least: micro-batches in flight on stage 0.
    """
    if microbatches >= least:
        return []
    return [
        f"schedule {name} needs at least {least} micro-batches per batch, got {microbatches} micro-batches and"
        f" {stages} stages: raise the global batch size, lower the micro-batch size or the data-parallel size, or use"
        " fewer stages"
    ]


def raise_problems(problems: list[str]) -> None:
    """Raise one ValueError that lists all problems, if there are any."""
    if problems:
        raise ValueError("; ".join(problems))
