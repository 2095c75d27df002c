# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Messages between stages and sums over them: none lost, none mixed up, no deadlock, whatever their size and order."""

import pytest


@pytest.mark.parametrize("late", [None, 0, 1])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("elements", "steps"),
    [(1, 50), (2**21, 20)],
    ids=["one element", "8 MiB, more than sockets buffer"],
)
def test_every_message_arrives_in_its_place(pool, ranks, elements, steps, late):
    assert pool.run("tests.distributed.jobs:exchange", elements, steps, late, ranks=ranks) == [0] * ranks


def test_sums_of_two_chunks_do_not_mix(pool):
    assert pool.run("tests.distributed.jobs:crossed_sums", ranks=2) == [[1.0, 10.0]] * 2
