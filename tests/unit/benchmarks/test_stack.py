# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The benchmark's own arithmetic: the stack, its placements, the check that keeps wrong contenders out."""

import pytest
import torch

from benchmarks import reference, schedules, whole
from benchmarks.contenders import build, folded, looped, pieces_of, straight
from benchmarks.stack import Cell, Pace, emulated_cell, make_piece
from megatron_async.schedules import StageCosts

TINY = Cell(2, 2, sequence=4, samples=1, hidden=8)


@pytest.mark.parametrize("place", [straight, looped, folded])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_placements_hold_every_piece_once_and_in_order(place, stages):
    placement = place(stages)
    assert [piece for _, pieces in placement for piece in pieces] == list(range(2 * stages))
    for rank in range(stages):
        assert len(pieces_of(build(Cell(stages, 2, hidden=8), placement, rank).values())) == 2


def test_links_join_ranks_and_nothing_else():
    cell = emulated_cell(2, 2, Pace(1.0, 2.0, transfer_ms=3.0))
    links = {index: stage.links for rank in (0, 1) for index, stage in build(cell, folded(2), rank).items()}
    assert links == {0: (0.0, 3.0), 1: (3.0, 0.0), 2: (0.0, 3.0), 3: (3.0, 0.0)}


@pytest.mark.parametrize("cell", [TINY, emulated_cell(2, 2, Pace(0.1, 0.1))])
def test_the_check_tells_schedules_apart(cell):
    """Weights of one delay must not pass for those of another."""
    trained = {name: reference.trained(cell, name) for name in ("torch-1f1b", "2bw", "wpipe", "pipedream")}
    for name, pieces in trained.items():
        for other, expected in trained.items():
            off = reference.largest_distance(cell, dict(enumerate(pieces)), expected)
            assert (off <= schedules.TOLERANCE) == (name == other), f"{name} against {other}: {off}"


def test_the_check_catches_a_lost_micro_batch():
    expected = reference.trained(TINY, "torch-1f1b")
    wrong = reference.trained(Cell(2, 1, sequence=4, samples=1, hidden=8), "torch-1f1b")
    assert reference.largest_distance(TINY, dict(enumerate(wrong)), expected) > 0.01


def test_boundaries_give_a_rank_its_gradients():
    """The limit computes the same gradients as the whole stack does."""
    piece, whole = make_piece(TINY, 0), reference.trained(TINY, "torch-1f1b")
    first, second = make_piece(TINY, 0), make_piece(TINY, 1)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.05, momentum=0.9)
    seen = reference.boundaries(TINY, 0)
    for batch in range(reference.CHECKED_BATCHES):
        optimizer.zero_grad()
        for source, gradient in seen[batch * TINY.microbatches : (batch + 1) * TINY.microbatches]:
            second(first(source)).backward(gradient)
        optimizer.step()
    assert reference.distance(first, whole[0], piece) < 1e-5


def test_cells_have_unique_settings():
    for extent in schedules.EXTENTS:
        cells = [(cell.stages, cell.microbatches, cell.setting) for cell in schedules.cells(extent, Pace(40, 80))]
        assert len(set(cells)) == len(cells)
    assert {stages for stages, _, setting in cells if setting == "emulated"} == {2, 4, 8, 16}


def test_speed_up_over_1f1b_is_bounded():
    balanced = StageCosts(forward=1.0, backward=2.0)
    for stages, microbatches in ((2, 2), (2, 4), (4, 8)):
        bound = whole.largest_speedup([balanced] * stages, microbatches)
        assert bound == pytest.approx((microbatches + stages - 1) / microbatches)


def test_an_update_is_in_no_bubble():
    """All stages make it at once: 1F1B takes (M + P - 1) micro-batches and one update, 2BW M and one."""
    assert whole.largest_speedup([StageCosts(1.0, 2.0, 1.5)] * 2, 2) == pytest.approx((9 + 1.5) / (6 + 1.5))


def test_a_faster_stage_gains_nothing_but_fills_less():
    """1F1B: the slower stage's two forwards and backwards, and the faster one's one of each, less what overlaps."""
    costs = [StageCosts(forward=1.0, backward=2.0), StageCosts(forward=0.5, backward=1.0)]
    # Stage 0 forwards until 2; stage 1 sends its first gradient at 1 + 0.5 + 1; two backwards follow at stage 0.
    assert whole.largest_speedup(costs, 2) == pytest.approx((2.5 + 4.0) / 6.0)


def test_costs_of_stages_alone_are_medians():
    batches = [(20.0, 6.0, 10.0, 4.0), (22.0, 8.0, 10.0, 4.0), (98.0, 9.0, 80.0, 9.0)]
    assert whole.stage_costs([[batches]], 2) == [StageCosts(forward=4.0, backward=5.0, update=4.0)]
