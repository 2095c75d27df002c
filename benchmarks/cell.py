# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""One cell on one rank: contenders built, checked against the one-process reference, then timed in turns."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist

from benchmarks import megatron_contenders, reference, torch_contenders
from benchmarks.contenders import LIMIT, OURS, Contender, Factory, Refused
from benchmarks.stack import Cell, SleepingLayer
from benchmarks.turns import Turns, between_limits, in_rounds
from megatron_async.mcore.parallel import initialize
from megatron_async.mcore.training import set_global_variables


@dataclass(slots=True)
class Outcome:
    """What a rank found in a cell.

    Attributes:
        turns: what was timed.
        distances: by contender, the largest distance of this rank's weights from the reference's.
        refused: by contender that cannot run here, why.
    """

    turns: Turns = field(default_factory=Turns)
    distances: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def factories(cell: Cell) -> Mapping[str, Factory]:
    """Every contender by name; starts process groups and Megatron's state for the cell."""
    args = megatron_contenders.command_line(cell)
    set_global_variables(args)
    initialize(args)
    return {
        LIMIT: torch_contenders.limit,
        **{name: partial(torch_contenders.pipelined, name) for name in torch_contenders.NAMES},
        "megatron-1f1b": partial(megatron_contenders.megatron_1f1b, args),
        "megatron-interleaved-1f1b": partial(megatron_contenders.megatron_interleaved, args),
        **{name: partial(megatron_contenders.delayed, name, args) for name in OURS},
    }


def run(cell: Cell, names: Sequence[str], rounds: int, batches: int, patience_s: float) -> Outcome:
    """Measure a cell on this rank.

    Args:
        names: contenders, in the order of each round; the limit is the first.
        rounds: turns of each contender; more where some are repeated.
        batches: batches of each turn that count; those around them do not.
        patience_s: where compute is real, how long to wait and repeat turns while the machine is not at full speed.
    """
    makers = factories(cell)
    rank, outcome = dist.get_rank(), Outcome()
    contenders: dict[str, Contender] = {}
    for name in names:
        try:
            contenders[name] = makers[name](cell, rank)
        except Refused as refusal:
            outcome.refused[name] = str(refusal)
            continue
        contenders[name].run(reference.CHECKED_BATCHES)
        expected = reference.trained(cell, name)
        outcome.distances[name] = reference.largest_distance(cell, dict(contenders[name].pieces), expected)
    for contender in contenders.values():
        for piece in contender.pieces.values():
            if isinstance(piece, SleepingLayer):
                piece.awake = False
    take, others = partial(_turn, cell, contenders, batches), [name for name in contenders if name != LIMIT]
    if cell.pace is None:
        outcome.turns = between_limits(take, others, rounds, largest=_largest, patience_s=patience_s)
    else:
        outcome.turns = in_rounds(take, others, rounds)
    return outcome


def _turn(cell: Cell, contenders: Mapping[str, Contender], batches: int, name: str) -> list[float]:
    contender = contenders[name]
    dist.barrier()
    before, after = contender.unsteady
    if cell.pace is None:
        before = max(before, 1)  # caches hold what the contender before this one left
    ends = [time.monotonic(), *contender.run(before + batches + after)]
    steady = ends[before : len(ends) - after]
    return [(end - start) * 1e3 for start, end in pairwise(steady)]


def _largest(number: float) -> float:
    """Over all ranks."""
    largest = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)
