# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The simulator against closed formulas, an independent longest-path computation and by hand."""

from dataclasses import replace

import pytest

from megatron_async.schedules import (
    Backward,
    Forward,
    Reduce,
    StageCosts,
    Update,
    make_schedule,
    simulate,
)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("microbatches", [1, 2, 5, 16])
def test_1f1b_equals_the_closed_formula(stages, microbatches) -> None:
    schedule = make_schedule("1f1b", stages, microbatches, 5)
    result = simulate(schedule, StageCosts(forward=1.25, backward=2.5, update=0.5), reduction=0.25)
    batch_time = (microbatches + stages - 1) * (1.25 + 2.5)
    assert result.makespan == pytest.approx(5 * (batch_time + 0.75), rel=1e-12)
    without_update = simulate(schedule, StageCosts(forward=1.25, backward=2.5))
    rho = (stages - 1) / microbatches  # bubble over compute
    assert without_update.bubble_share == pytest.approx(rho / (1 + rho), rel=1e-12)
    assert without_update.steady_bubble_share == pytest.approx(rho / (1 + rho), rel=1e-12)


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_slowest_stage_sets_the_pace_of_2bw(stages) -> None:
    costs = [StageCosts(1.0, 2.0) for _ in range(stages)]
    costs[stages // 2] = StageCosts(1.5, 3.0)
    result = simulate(make_schedule("2bw", stages, 2 * stages, 9), costs)
    for rank, share in enumerate(result.steady_busy_share):
        assert share == pytest.approx(1.0 if rank == stages // 2 else 3.0 / 4.5, rel=1e-9)


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("microbatches_per_stage", [1, 2])
def test_2bw_hides_the_reduction(stages, microbatches_per_stage) -> None:
    """An update comes M - (P-1) slots after the last reduction has started."""
    microbatches = microbatches_per_stage * stages
    schedule = make_schedule("2bw", stages, microbatches, 5)
    slack = (microbatches - (stages - 1)) * 3.0
    hidden = simulate(schedule, StageCosts(1.0, 2.0), reduction=slack)
    assert hidden.steady_bubble_share == pytest.approx(0.0, abs=1e-12)
    exposed = simulate(schedule, StageCosts(1.0, 2.0), reduction=slack + 1.0)
    assert exposed.steady_bubble_share > 0.01


@pytest.mark.parametrize("name", ["1f1b", "2bw", "wpipe", "pipedream"])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 3), (4, 4), (5, 8)])
def test_every_action_starts_as_early_as_it_can(name, stages, microbatches) -> None:
    """Uneven ranks and real transfers: each start is the latest of the ends that it waits for."""
    schedule = make_schedule(name, stages, microbatches, 3, first_batch=2)
    costs = [StageCosts(1.0 + 0.3 * (r % 3), 2.0 - 0.1 * r, 0.2) for r in range(stages)]
    result = simulate(schedule, costs, transfer=0.15, reduction=0.4)
    ends = {
        (rank, action): end
        for rank, row in enumerate(schedule.actions)
        for action, (_, end) in zip(row, result.spans[rank], strict=True)
    }
    last = schedule.stages * schedule.chunks - 1
    for rank, row in enumerate(schedule.actions):
        clock = 0.0
        for action, (start, end) in zip(row, result.spans[rank], strict=True):
            ready = [clock]
            if isinstance(action, Forward | Backward):
                here = schedule.virtual_stage(rank, action.chunk)
                source = here + (-1 if isinstance(action, Forward) else 1)
                if 0 <= source <= last:
                    other, chunk = schedule.place_of(source)
                    rule = schedule.versions[other][chunk]
                    version = rule(schedule.batch_of(action.microbatch))
                    sent = replace(action, chunk=chunk, version=version)
                    ready.append(ends[other, sent] + (0.15 if other != rank else 0.0))
                cost = costs[rank].forward if isinstance(action, Forward) else costs[rank].backward
            elif isinstance(action, Update):
                ranks = range(stages) if schedule.reduction_across_ranks else [rank]
                ready += [ends[other, Reduce(action.chunk, action.batch)] + 0.4 for other in ranks]
                cost = costs[rank].update
            else:
                cost = 0.0
            assert start == pytest.approx(max(ready), rel=1e-12, abs=1e-12)
            assert end - start == pytest.approx(cost / schedule.chunks, rel=1e-9, abs=1e-12)
            clock = end
    busy = [sum(end - start for start, end in row) for row in result.spans]
    assert result.busy == pytest.approx(busy, rel=1e-9)
    assert result.bubble_share == pytest.approx(1.0 - sum(busy) / (stages * result.makespan), rel=1e-9, abs=1e-12)
    assert all(0.0 < share <= 1.0 + 1e-12 for share in (*result.busy_share, *result.steady_busy_share))


def test_short_tables_have_no_steady_state() -> None:
    result = simulate(make_schedule("2bw", 4, 4, 2), StageCosts(1.0, 2.0))
    assert result.steady_bubble_share == result.bubble_share
    assert result.steady_busy_share == result.busy_share


@pytest.mark.parametrize(
    ("costs", "arguments", "message"),
    [
        ([StageCosts(1.0, 2.0)] * 3, {}, "costs of 3 ranks for 2 stages"),
        (StageCosts(-1.0, 2.0), {}, r"time -1\.0: must not be negative"),
        (StageCosts(1.0, 2.0), {"transfer": -0.5}, r"time -0\.5"),
    ],
)
def test_wrong_costs_are_refused(costs, arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(make_schedule("2bw", 2, 2, 2), costs, **arguments)


def test_deadlocked_table_is_refused() -> None:
    schedule = make_schedule("1f1b", 2, 1, 1)
    rows = (tuple(reversed(schedule.actions[0])), schedule.actions[1])
    with pytest.raises(ValueError, match="deadlocks on ranks"):
        simulate(replace(schedule, actions=rows), StageCosts(1.0, 2.0))
