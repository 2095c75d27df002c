# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""What updates that are launched at once need of the tables.

At R(b) a step may overwrite the oldest weights. The report of batch b is due at R(b+1) and may end the segment.
"""

from itertools import product

import pytest

from megatron_async.schedules import SCHEDULES, Action, Backward, Forward, Reduce, make_schedule
from megatron_async.schedules.phases import Phases

DELAYED = [name for name, definition in SCHEDULES.items() if definition.delayed]
SHAPES = list(product(DELAYED, (2, 3, 5), (1, 2)))


def shape_of(name: str, stages: int, factor: int) -> tuple[int, int]:
    """Micro-batches per batch, batches."""
    least = SCHEDULES[name].least_microbatches(stages)
    return factor * least if not SCHEDULES[name].update_per_microbatch else 1, 3 * stages + 6


@pytest.mark.parametrize(("name", "stages", "factor"), SHAPES)
@pytest.mark.parametrize("synchronous", [0, 2])
def test_no_action_after_the_reduction_needs_the_weights_that_the_step_overwrites(name, stages, factor, synchronous):
    microbatches, batches = shape_of(name, stages, factor)
    definition = SCHEDULES[name]
    for rank in range(stages):
        delays, limits = definition.delays(stages, rank), definition.version_limits(stages, rank)
        versions = Phases(synchronous, 10**6).versions(delays[0])
        row = list(
            definition.plan(
                stages=stages,
                stage=rank,
                microbatches=microbatches,
                batches=batches,
                first_batch=synchronous,
                versions=versions,
            )
        )
        for chunk, limit in enumerate(limits):
            alive = {max(0, synchronous - age) for age in range(limit)}
            for step, action in enumerate(row):
                if not isinstance(action, Reduce) or action.chunk != chunk:
                    continue
                retired = min(alive) if len(alive) == limit else None
                alive = (alive - {retired}) | {action.batch + 1}
                later = [
                    one.version for one in row[step:] if isinstance(one, Forward | Backward) and one.chunk == chunk
                ]
                assert retired not in later, (rank, action)


def batch_of(action: Action, microbatches: int) -> int:
    return action.microbatch // microbatches if isinstance(action, Forward | Backward) else action.batch


@pytest.mark.parametrize(("name", "stages", "factor"), SHAPES)
def test_a_segment_can_end_after_a_report(name, stages, factor):
    """As many batches after the reported one as the loop allows: no rank has started a later batch, nor posted a
    receive for one, and the shorter plan agrees up to there."""
    microbatches, batches = shape_of(name, stages, factor)
    for rank, row in enumerate(make_schedule(name, stages, microbatches, batches).actions):
        for step, action in enumerate(row):
            if not isinstance(action, Reduce) or action.chunk != 0 or action.batch == 0:
                continue
            last = action.batch - 1 + max(3, stages)
            if last >= batches - 1:
                break
            shorter = make_schedule(name, stages, microbatches, last + 1).actions[rank]
            assert shorter[: step + 1] == row[: step + 1], (rank, action)
            assert max(batch_of(one, microbatches) for one in row[:step]) <= last, (rank, action)
            for kind, chunk in product((Forward, Backward), range(SCHEDULES[name].chunks)):
                if kind is Forward and rank == chunk == 0:
                    continue  # receives nothing
                coming = next(one for one in row[step:] if isinstance(one, kind) and one.chunk == chunk)
                assert batch_of(coming, microbatches) <= last, (rank, action)
