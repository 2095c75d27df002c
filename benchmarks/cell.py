# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""One cell on one rank: contenders are built, checked against the one-process reference, and timed in turns."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch.distributed as dist

from benchmarks import megatron_contenders, reference, torch_contenders
from benchmarks.contenders import LIMIT, Contender, Refused
from benchmarks.stack import Cell, SleepingLayer
from megatron_async.mcore.parallel import shut_down

InTurns = dict[str, tuple[list[list[float]], list[list[float]]]]
"""Milliseconds by turn and batch, for each contender: its turns, and the limit's turns before them."""


@dataclass(slots=True)
class Outcome:
    """Results of a rank in a cell, by contender.

    Attributes:
        turns: the limit included.
        distances: the largest distance of this rank's weights from the reference's.
        refused: the reason why it cannot run here.
    """

    turns: InTurns = field(default_factory=dict)
    distances: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def run(cell: Cell, names: Sequence[str]) -> Outcome:
    """Measure contenders on this rank, in this order in each round; the limit is the first."""
    factories = {**megatron_contenders.factories(cell), **torch_contenders.factories()}
    outcome, contenders = Outcome(), dict[str, Contender]()
    for name in names:
        try:
            contenders[name] = factories[name](cell, dist.get_rank())
        except Refused as refusal:
            outcome.refused[name] = str(refusal)
            continue
        contenders[name].run(reference.CHECKED_BATCHES)
        expected = reference.trained(cell, name)
        outcome.distances[name] = reference.largest_distance(cell, contenders[name].pieces, expected)
    for contender in contenders.values():
        for piece in contender.pieces.values():
            if isinstance(piece, SleepingLayer):
                piece.awake = False

    def take(name: str) -> list[float]:
        contender = contenders[name]
        dist.barrier()
        before, after = contender.unsteady
        if cell.pace is None:
            before = max(before, 1)  # caches hold data of the contender before this one
        ends = [time.monotonic(), *contender.run(before + cell.batches + after)]
        return [(end - start) * 1e3 for start, end in pairwise(ends[before : len(ends) - after])]

    others = [name for name in contenders if name != LIMIT]
    outcome.turns = in_rounds(take, others, cell.rounds, each=cell.pace is None)
    dist.barrier()
    shut_down()
    return outcome


def in_rounds(take: Callable[[str], list[float]], names: Sequence[str], rounds: int, *, each: bool) -> InTurns:
    """Give turns to contenders, round after round.

    Args:
        take: gives a contender a turn; returns the milliseconds of its batches.
        names: contenders without the limit.
        rounds: turns of each.
        each: whether the limit has a turn before each contender, for a machine whose speed changes, or once a round.
    """
    found: InTurns = {name: ([], []) for name in (LIMIT, *names)}
    for _ in range(rounds):
        for index, name in enumerate(names):
            if each or index == 0:
                alone = take(LIMIT)
                for turns in found[LIMIT]:
                    turns.append(alone)
            for turns, turn in zip(found[name], (take(name), alone), strict=True):
                turns.append(turn)
    return found
