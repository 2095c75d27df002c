# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Bubble formulas: the paper's table of slowdowns, and agreement with each other."""

import pytest

from tests.formulas import (
    MicroBatchCosts,
    asynchronous_bubble,
    dualpipe_bubble,
    interleaved_bubble,
    one_f_one_b_bubble,
    zb1p_bubble,
)

PLAIN = MicroBatchCosts(forward=1.0, backward=2.0, weight_gradient=1.0)
RECOMPUTED = MicroBatchCosts(forward=1.0, backward=3.0, weight_gradient=1.0)
SLOWDOWNS = [
    (lambda m: asynchronous_bubble(), (1.000, 1.000, 1.000)),
    (lambda m: one_f_one_b_bubble(16, m), (1.938, 1.469, 1.234)),
    (lambda m: zb1p_bubble(16, m, PLAIN), (1.313, 1.156, 1.078)),
    (lambda m: dualpipe_bubble(16, m, PLAIN), (1.292, 1.146, 1.073)),
    (lambda m: zb1p_bubble(16, m, RECOMPUTED), (1.469, 1.234, 1.117)),
    (lambda m: dualpipe_bubble(16, m, RECOMPUTED), (1.438, 1.219, 1.109)),
]


@pytest.mark.parametrize(
    ("bubble", "slowdowns"),
    SLOWDOWNS,
    ids=["async", "1f1b", "zb1p", "dualpipe", "zb1p-recompute", "dualpipe-recompute"],
)
def test_slowdowns_with_16_stages(bubble, slowdowns) -> None:
    """Three printed digits; the table rounds halves up."""
    for microbatches, slowdown in zip((16, 32, 64), slowdowns, strict=True):
        assert 1 + bubble(microbatches) == pytest.approx(slowdown, rel=0.0, abs=5.001e-4)


def test_interleaving_divides_the_bubble_by_the_chunks() -> None:
    assert interleaved_bubble(8, 16, 1) == one_f_one_b_bubble(8, 16)
    assert interleaved_bubble(8, 16, 4) == pytest.approx(7 / 64, rel=1e-15)


@pytest.mark.parametrize("costs", [(0.0, 2.0, 1.0), (1.0, 0.0, 0.0), (1.0, 2.0, 2.5), (1.0, 2.0, -0.1)])
def test_impossible_costs_are_refused(costs) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        MicroBatchCosts(*costs)
