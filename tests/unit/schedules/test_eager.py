# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The eager 2BW stream: the same versions and updates as 2BW, with transfers between stages hidden."""

import pytest

from megatron_async.schedules import Backward, Forward, StageCosts, Update, make_schedule, simulate, validate

GRID = [
    (stages, microbatches)
    for stages in (1, 2, 3, 4, 6, 8, 11, 16)
    for microbatches in sorted({2 * stages - 1, 2 * stages, 3 * stages, 4 * stages})
]
BALANCED = StageCosts(forward=1.0, backward=2.0)


@pytest.mark.parametrize("first_batch", [0, 5])
@pytest.mark.parametrize(("stages", "microbatches"), GRID)
def test_table_is_valid_and_holds_two_versions(stages, microbatches, first_batch) -> None:
    schedule = make_schedule("2bw-eager", stages, microbatches, 4, first_batch=first_batch)
    validate(schedule)
    result = simulate(schedule, BALANCED)
    assert result.live_activations == tuple(2.0 * (stages - 1 - rank) + 1 for rank in range(stages))
    assert result.weight_versions == ((2,),) * stages


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.5])
@pytest.mark.parametrize(("stages", "microbatches"), GRID)
def test_transfers_of_half_a_slot_cost_nothing(stages, microbatches, share) -> None:
    result = simulate(make_schedule("2bw-eager", stages, microbatches, 6), BALANCED, transfer=3.0 * share)
    assert result.steady_bubble_share == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 3), (4, 8), (8, 15)])
def test_the_plain_stream_pays_for_them_and_so_does_this_one_beyond(stages, microbatches) -> None:
    def bubble(name: str, transfer: float) -> float:
        return simulate(make_schedule(name, stages, microbatches, 6), BALANCED, transfer=transfer).steady_bubble_share

    assert bubble("2bw", 0.3) > 0.05
    assert bubble("2bw-eager", 1.6) > 0.01


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 3), (3, 5), (4, 9)])
def test_every_stage_does_the_work_of_2bw_with_the_same_versions(stages, microbatches) -> None:
    eager, plain = (make_schedule(name, stages, microbatches, 4) for name in ("2bw-eager", "2bw"))
    for ahead, row in zip(eager.actions, plain.actions, strict=True):
        assert set(ahead) == set(row)
        for kind in (Forward, Backward, Update):
            assert [a for a in ahead if isinstance(a, kind)] == [a for a in row if isinstance(a, kind)]


def test_too_few_microbatches_are_refused() -> None:
    with pytest.raises(ValueError, match="2bw-eager needs at least 7 micro-batches per batch, got 6"):
        make_schedule("2bw-eager", 4, 6, 2)
