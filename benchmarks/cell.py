# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""One cell on one rank: contenders are built, checked against the one-process reference, and timed in turns."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import torch.distributed as dist

from benchmarks import megatron_contenders, reference, torch_contenders
from benchmarks.contenders import LIMIT, Contender, Refused
from benchmarks.stack import Cell, SleepingLayer
from benchmarks.turns import Turns, in_rounds


@dataclass(slots=True)
class Outcome:
    """Results of a rank in a cell, by contender.

    Attributes:
        turns: its turns, and the limit's turns before them.
        distances: the largest distance of this rank's weights from the reference's.
        refused: the reason why it cannot run here.
    """

    turns: Mapping[str, tuple[Turns, Turns]] = field(default_factory=dict)
    distances: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def run(cell: Cell, names: Sequence[str], rounds: int, batches: int) -> Outcome:
    """Measure a cell on this rank.

    Args:
        names: contenders, in the order of each round; the limit is the first.
        rounds: turns of each contender.
        batches: batches of each turn that count.
    """
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
    others = [name for name in contenders if name != LIMIT]
    outcome.turns = in_rounds(partial(_turn, cell, contenders, batches), others, rounds, each=cell.pace is None)
    return outcome


def _turn(cell: Cell, contenders: Mapping[str, Contender], batches: int, name: str) -> list[float]:
    contender = contenders[name]
    dist.barrier()
    before, after = contender.unsteady
    if cell.pace is None:
        before = max(before, 1)  # caches hold data of the contender before this one
    ends = [time.monotonic(), *contender.run(before + batches + after)]
    steady = ends[before : len(ends) - after]
    return [(end - start) * 1e3 for start, end in pairwise(steady)]
