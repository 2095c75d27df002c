# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""1f1b, pipedream and wpipe: valid over a grid of shapes, and what makes each of them what it is."""

from itertools import islice, pairwise

import pytest

from megatron_async.schedules import (
    SCHEDULES,
    Backward,
    Forward,
    Schedule,
    StageCosts,
    Update,
    make_schedule,
    simulate,
    validate,
)

COSTS = StageCosts(forward=1.0, backward=2.0)
STAGES = (1, 2, 3, 4, 6, 8, 11, 16)


def shapes(least) -> list[tuple[int, int]]:
    """Stages with micro-batches from the least allowed to 4 P."""
    return [(p, m) for p in STAGES for m in sorted({least(p), p, p + 1, 2 * p, 3 * p + 1}) if m >= least(p)]


@pytest.mark.parametrize("first_batch", [0, 3])
@pytest.mark.parametrize(("stages", "microbatches"), shapes(lambda stages: 1))
@pytest.mark.parametrize("name", ["1f1b", "pipedream"])
def test_tables_without_a_least_number_of_microbatches(name, stages, microbatches, first_batch) -> None:
    validate(make_schedule(name, stages, microbatches, 3, first_batch=first_batch))


@pytest.mark.parametrize(("stages", "microbatches"), [(9, 9), (12, 13), (16, 16), (16, 40), (16, 64)])
def test_wide_2bw_tables(stages, microbatches) -> None:
    validate(make_schedule("2bw", stages, microbatches, 4, first_batch=2))


@pytest.mark.parametrize(("stages", "microbatches"), shapes(lambda stages: stages))
def test_wpipe_has_no_bubble_and_the_activations_of_2bw(stages, microbatches) -> None:
    schedule = make_schedule("wpipe", stages, microbatches, 4)
    validate(schedule)
    # One slot of the table, F + B of a chunk, is free for the reduction of the gradient norm.
    result = simulate(schedule, COSTS, reduction=1.5)
    assert result.steady_bubble_share == pytest.approx(0.0, abs=1e-12)
    assert result.live_activations == tuple(stages - rank / 2 for rank in range(stages))
    assert result.weight_versions == ((2, 1),) * stages


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (5, 6), (8, 16), (14, 15)])
@pytest.mark.parametrize("backward", [1.0, 1.5, 3.0, 4.0])
def test_wpipe_with_other_costs_stays_close_to_the_limit(stages, microbatches, backward) -> None:
    result = simulate(make_schedule("wpipe", stages, microbatches, 6), StageCosts(1.0, backward))
    assert result.steady_bubble_share < 0.063


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 2), (2, 2), (4, 4), (4, 9)])
def test_wpipe_keeps_batches_of_the_fresh_chunk_apart_on_all_ranks(stages, microbatches) -> None:
    schedule = make_schedule("wpipe", stages, microbatches, 5)
    result = simulate(schedule, [StageCosts(1.0 + rank % 2, 2.5 - rank / 4) for rank in range(stages)])
    spans = [
        (action.microbatch // microbatches, span)
        for row, row_spans in zip(schedule.actions, result.spans, strict=True)
        for action, span in zip(row, row_spans, strict=True)
        if isinstance(action, Forward | Backward) and action.chunk == 1
    ]
    for batch in range(1, 5):
        ended = max(end for number, (_, end) in spans if number == batch - 1)
        assert min(start for number, (start, _) in spans if number == batch) >= ended


def test_wpipe_versions_and_updates() -> None:
    schedule = make_schedule("wpipe", 4, 8, 5)
    for row in schedule.actions:
        for step, action in enumerate(row):
            if isinstance(action, Forward | Backward):
                batch = action.microbatch // 8
                assert action.version == (batch if action.chunk == 1 else max(batch - 1, 0))
            if isinstance(action, Update) and action.batch < 3:
                following = row[step + 1]
                assert isinstance(following, Forward)
                assert following.chunk == action.chunk
                assert following.microbatch == (action.batch + (1 if action.chunk == 1 else 2)) * 8


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 3), (4, 4), (4, 9)])
def test_a_running_wpipe_segment_can_be_shortened(stages, microbatches) -> None:
    short = make_schedule("wpipe", stages, microbatches, 4, first_batch=2)
    long = make_schedule("wpipe", stages, microbatches, 7, first_batch=2)
    for short_row, long_row in zip(short.actions, long.actions, strict=True):
        for batch in (2, 3):
            length = long_row.index(Update(0, batch)) + 1
            assert short_row[:length] == long_row[:length]
            # Equality leaves out how many receives are due.
            dues = [[getattr(action, "due", 0) for action in row[:length]] for row in (short_row, long_row)]
            assert dues[0] == dues[1]


def test_wpipe_has_no_table_with_fewer_microbatches_than_stages() -> None:
    with pytest.raises(ValueError, match="3 micro-batches and 4 stages"):
        SCHEDULES["wpipe"].plan(stages=4, microbatches=3, batches=1, stage=0)


def test_wpipe_is_periodic_in_the_steady_state() -> None:
    """Moved by one batch, the actions between two first forwards of chunk 1 repeat."""

    def shifted(action, batches: int):
        if isinstance(action, Forward | Backward):
            return action.kind, action.chunk, action.microbatch - 6 * batches, action.version - batches
        return action.kind, action.chunk, action.batch - batches

    for row in make_schedule("wpipe", 4, 6, 8).actions:
        starts = [row.index(Forward(1, 6 * batch, batch)) for batch in (3, 4, 5)]
        first, second = (row[a:b] for a, b in pairwise(starts))
        assert [shifted(action, 3) for action in first] == [shifted(action, 4) for action in second]


@pytest.mark.parametrize("name", ["1f1b", "wpipe", "pipedream"])
def test_plans_are_lazy(name) -> None:
    definition = SCHEDULES[name]
    actions = definition.plan(
        stages=4,
        microbatches=8,
        batches=10**12,
        stage=3,
        versions=definition.version_rules(4, 3)[0],
    )
    assert [str(action) for action in islice(actions, 1)] == ["F0.0@v0"]


def test_1f1b_drains_after_every_batch() -> None:
    schedule = make_schedule("1f1b", 3, 2, 2)
    assert " ".join(map(str, schedule.actions[0])) == (
        "F0.0@v0 F0.1@v0 B0.0@v0 B0.1@v0 R0.0 U0.0 F0.2@v1 F0.3@v1 B0.2@v1 B0.3@v1 R0.1 U0.1"
    )
    assert " ".join(map(str, schedule.actions[2][:6])) == "F0.0@v0 B0.0@v0 F0.1@v0 B0.1@v0 R0.0 U0.0"


def test_pipedream_delays_and_versions() -> None:
    schedule = make_schedule("pipedream", 4, 1, 12)
    result = simulate(schedule, COSTS)
    assert result.weight_versions == ((4,), (3,), (2,), (1,))
    assert result.live_activations == (4.0, 3.0, 2.0, 1.0)
    assert result.steady_bubble_share == pytest.approx(0.0, abs=1e-12)
    for rank, row in enumerate(schedule.actions):
        newest = 0
        for action in row:
            if isinstance(action, Forward):
                assert action.version == max(action.microbatch - (3 - rank), 0)
                # While the pipe is full that is the newest version there.
                assert action.version == newest
            elif isinstance(action, Update):
                newest = action.batch + 1


def test_pipedream_counts_microbatches_as_batches() -> None:
    by_batch: Schedule = make_schedule("pipedream", 3, 1, 12)
    by_microbatch: Schedule = make_schedule("pipedream", 3, 4, 3)
    assert by_batch.actions == by_microbatch.actions
    assert by_microbatch.update_range == range(12)
