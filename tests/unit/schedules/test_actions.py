# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The vocabulary: text forms and version rules."""

import pytest

from megatron_async.schedules import Backward, Forward, Reduce, Update, make_schedule
from megatron_async.schedules.actions import stale_versions
from megatron_async.schedules.phases import Phases


def test_text_forms() -> None:
    actions = (Forward(0, 3, 2), Backward(1, 12, 0), Reduce(0, 4), Update(1, 5))
    assert [str(action) for action in actions] == ["F0.3@v2", "B1.12@v0", "R0.4", "U1.5"]
    assert [action.kind for action in actions] == ["F", "B", "R", "U"]


def test_actions_are_frozen_values() -> None:
    assert Forward(0, 1, 0) == Forward(0, 1, 0)
    assert Forward(0, 1, 0) != Backward(0, 1, 0)
    with pytest.raises(AttributeError):
        Forward(0, 1, 0).version = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (stale_versions(0), [0, 1, 2, 3, 4, 5]),
        (stale_versions(1), [0, 0, 1, 2, 3, 4]),
        (Phases(2, 99).versions(1), [0, 1, 2, 2, 3, 4]),
        (Phases(0, 4).versions(1), [0, 0, 1, 2, 4, 5]),
        (Phases(1, 5).versions(1), [0, 1, 1, 2, 3, 5]),
        (stale_versions(3), [0, 0, 0, 0, 1, 2]),
    ],
)
def test_version_rules(rule, expected) -> None:
    assert [rule(batch) for batch in range(6)] == expected


def test_places_of_virtual_stages_cover_the_model_in_order() -> None:
    schedule = make_schedule("wpipe", 3, 4, 1)
    places = [schedule.place_of(virtual_stage) for virtual_stage in range(6)]
    assert places == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    assert [schedule.virtual_stage(rank, chunk) for rank, chunk in places] == list(range(6))


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (("3bw", 0, 4, 1), ["unknown schedule '3bw'", "1f1b, 2bw, wpipe, pipedream", "stages = 0"]),
        (("1f1b", 0, 0, 0), ["stages = 0", "microbatches = 0", "batches = 0"]),
        (
            ("2bw", 4, 3, 1),
            ["3 micro-batches and 4 stages", "raise the global batch size", "use fewer stages"],
        ),
        (("wpipe", 8, 5, 2), ["5 micro-batches and 8 stages", "lower the micro-batch size"]),
    ],
)
def test_all_problems_are_reported_at_once(arguments, messages) -> None:
    with pytest.raises(ValueError) as caught:
        make_schedule(*arguments)
    for message in messages:
        assert message in str(caught.value)


def test_negative_first_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="first_batch = -1"):
        make_schedule("2bw", 2, 2, 2, first_batch=-1)
