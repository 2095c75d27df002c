# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Checks of the numbers that every schedule starts from."""


def shape_problems(*, stages: int, microbatches: int, batches: int, first_batch: int) -> list[str]:
    """What is wrong with the shape of a table; empty when it is fine."""
    problems = [
        f"{name} = {value}: must be at least 1"
        for name, value in (("stages", stages), ("microbatches", microbatches), ("batches", batches))
        if value < 1
    ]
    if first_batch < 0:
        problems.append(f"first_batch = {first_batch}: must not be negative")
    return problems


def overlap_problems(*, name: str, stages: int, microbatches: int, least: int) -> list[str]:
    """What forbids batches to overlap with a delay of one; empty when they may.

    A batch of fewer micro-batches than stage 0 has in flight would still have backwards to come when the update
    that follows the next batch is due, so a third weight version would be needed (PipeDream-2BW, arXiv 2006.09503).

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


def check_stage(*, stages: int, microbatches: int, batches: int, stage: int, first_batch: int) -> None:
    """Raise one ValueError with everything that is wrong with the arguments of a stage's plan."""
    problems = shape_problems(stages=stages, microbatches=microbatches, batches=batches, first_batch=first_batch)
    if not 0 <= stage < stages:
        problems.append(f"stage = {stage}: must be one of 0 .. {stages - 1}")
    raise_problems(problems)


def raise_problems(problems: list[str]) -> None:
    """Raise one ValueError that lists all problems, if there are any."""
    if problems:
        raise ValueError("; ".join(problems))
