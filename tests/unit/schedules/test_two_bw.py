# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""2BW: shape of the stream, place of the updates, prefixes, segments."""

from itertools import islice

import pytest

from megatron_async.schedules import (
    SCHEDULES,
    Backward,
    Forward,
    Reduce,
    StageCosts,
    Update,
    make_schedule,
    simulate,
    validate,
)
from megatron_async.schedules.actions import stale_versions
from megatron_async.schedules.phases import Phases

GRID = [(stages, microbatches) for stages in range(1, 9) for microbatches in range(stages, 3 * stages + 1)]


@pytest.mark.parametrize(("stages", "microbatches"), GRID)
def test_table_is_valid_and_without_bubble_in_steady_state(stages, microbatches) -> None:
    schedule = make_schedule("2bw", stages, microbatches, 4)
    validate(schedule)
    result = simulate(schedule, StageCosts(forward=1.0, backward=2.0))
    assert result.steady_bubble_share == pytest.approx(0.0, abs=1e-12)
    assert result.makespan == (4 * microbatches + stages - 1) * 3.0
    assert result.live_activations == tuple(float(stages - rank) for rank in range(stages))
    assert result.weight_versions == ((2,),) * stages


@pytest.mark.parametrize(("stages", "microbatches"), GRID)
def test_stream_follows_the_definition(stages, microbatches) -> None:
    batches = 4
    total = batches * microbatches
    for stage in range(stages):
        actions = list(SCHEDULES["2bw"].plan(stages=stages, microbatches=microbatches, batches=batches, stage=stage))
        ahead = stages - 1 - stage
        computes = [a for a in actions if isinstance(a, Forward | Backward)]
        kinds = "".join(a.kind for a in computes)
        assert kinds == "F" * ahead + "FB" * (total - ahead) + "B" * ahead
        for kind in (Forward, Backward):
            assert [a.microbatch for a in computes if isinstance(a, kind)] == list(range(total))
        assert all(a.version == max(a.microbatch // microbatches - 1, 0) for a in computes)
        for batch in range(batches):
            reduce = actions.index(Reduce(0, batch))
            last = actions[reduce - 1]
            assert isinstance(last, Backward)
            assert last.microbatch == (batch + 1) * microbatches - 1
        for batch in range(batches - 2):
            following = actions[actions.index(Update(0, batch)) + 1]
            assert isinstance(following, Forward)
            assert following.microbatch == (batch + 2) * microbatches
        assert actions[-2:] == [Update(0, batches - 2), Update(0, batches - 1)]


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 2), (3, 3), (4, 4), (4, 7), (5, 11), (8, 8)])
@pytest.mark.parametrize("first_batch", [0, 5])
def test_a_running_segment_can_be_shortened(stages, microbatches, first_batch) -> None:
    def plan(batches: int, stage: int) -> list[object]:
        return list(
            SCHEDULES["2bw"].plan(
                stages=stages,
                microbatches=microbatches,
                batches=batches,
                stage=stage,
                first_batch=first_batch,
            )
        )

    for stage in range(stages):
        for longer in range(4, 8):
            long = plan(longer, stage)
            for shorter in range(3, longer):
                short = plan(shorter, stage)
                for batch in range(first_batch, first_batch + shorter - 2):
                    length = long.index(Update(0, batch)) + 1
                    assert short[:length] == long[:length]


def test_plan_is_lazy() -> None:
    actions = SCHEDULES["2bw"].plan(stages=4, microbatches=8, batches=10**12, stage=0)
    assert [str(action) for action in islice(actions, 5)] == [
        "F0.0@v0",
        "F0.1@v0",
        "F0.2@v0",
        "F0.3@v0",
        "B0.0@v0",
    ]


def test_segments_go_on_by_the_number_of_the_batch() -> None:
    for first_batch, batches in ((0, 3), (3, 1), (4, 4)):
        schedule = make_schedule("2bw", 3, 4, batches, first_batch=first_batch)
        validate(schedule)
        versions = {a.microbatch // 4: a.version for a in schedule.actions[1] if isinstance(a, Forward)}
        assert versions == {b: max(b - 1, 0) for b in range(first_batch, first_batch + batches)}


@pytest.mark.parametrize("batches", [(8,), (1, 7), (3, 5), (1, 1, 2, 4), (2,) * 4])
def test_scalar_trajectory_does_not_depend_on_drains(batches) -> None:
    """Loss w^2 / 2, SGD with learning rate 0.1 from 1.0, run by the actions alone."""
    weights = [1.0]
    first_batch = 0
    for count in batches:
        gradients: dict[int, float] = {}
        for action in SCHEDULES["2bw"].plan(stages=2, microbatches=2, batches=count, stage=0, first_batch=first_batch):
            if isinstance(action, Backward):
                batch = action.microbatch // 2
                gradients[batch] = gradients.get(batch, 0.0) + weights[action.version] / 2
            elif isinstance(action, Update):
                weights.append(weights[-1] - 0.1 * gradients.pop(action.batch))
        first_batch += count
    assert weights[:6] == pytest.approx([1.0, 0.9, 0.8, 0.71, 0.63, 0.559], rel=1e-12, abs=0.0)
    assert len(weights) == 9


def test_synchronous_start_and_cooldown_are_segments_of_one_batch() -> None:
    rule = Phases(2, 7).versions(1)
    for first_batch, batches in ((0, 1), (1, 1), (2, 5), (7, 1), (8, 1)):
        validate(make_schedule("2bw", 4, 5, batches, first_batch=first_batch, versions=rule))


def test_one_drained_batch_is_synchronous_1f1b() -> None:
    for stage in range(4):
        drained = SCHEDULES["2bw"].plan(
            stages=4, microbatches=6, batches=1, stage=stage, first_batch=3, versions=stale_versions(0)
        )
        assert tuple(drained) == make_schedule("1f1b", 4, 6, 1, first_batch=3).actions[stage]


def test_fewer_microbatches_than_stages_is_refused_at_the_call() -> None:
    with pytest.raises(ValueError, match="2 micro-batches and 4 stages"):
        SCHEDULES["2bw"].plan(stages=4, microbatches=2, batches=2, stage=0)


def test_wrong_stage_is_refused_at_the_call() -> None:
    with pytest.raises(ValueError, match=r"stage = 4: must be one of 0 \.\. 3"):
        SCHEDULES["2bw"].plan(stages=4, microbatches=4, batches=2, stage=4)
