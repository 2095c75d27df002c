# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Ranks that see different devices: all of them end before anything starts. What a rank sees is imitated."""

from collections.abc import Sequence
from unittest import mock

import pytest

from tests.distributed import jobs


def command(arguments: Sequence[str], with_gpu: Sequence[int]) -> tuple[int, str]:
    """`jobs.command` on a rank that sees a GPU if it is one of `with_gpu`."""
    import os

    from megatron_async import platform

    with mock.patch.object(platform, "sees_gpu", lambda: int(os.environ["RANK"]) in with_gpu):
        return jobs.command(arguments)


@pytest.mark.parametrize("device", ["auto", "cuda"])
@pytest.mark.parametrize("with_gpu", [(0, 2), (1,)])
def test_every_rank_ends_with_one_message(pool, device, with_gpu):
    answers = pool.run(f"{__name__}:command", [*jobs.BASE, "--device", device], with_gpu, ranks=3, timeout=100)
    assert [status for status, _ in answers] == [2, 2, 2]
    first, *others = (text for _, text in answers)
    assert others == ["", ""]
    without = "rank 1)" if with_gpu == (0, 2) else "rank 0, 2)"
    assert f"{3 - len(with_gpu)} of 3 ranks see no usable GPU" in first and without in first


def started_differently(arguments: Sequence[str], rate: str) -> tuple[int, str]:
    """`jobs.command` with a learning rate of its own on the last rank."""
    import os

    return jobs.command([*arguments, "--lr", rate if os.environ["RANK"] == "1" else "0.02"])


def test_ranks_with_other_arguments_are_named(pool):
    arguments = [*jobs.BASE, "--pipeline-model-parallel-size", "2"]
    answers = pool.run(f"{__name__}:started_differently", arguments, "0.2", ranks=2, timeout=100)
    assert [status for status, _ in answers] == [2, 2] and answers[1][1] == ""
    assert "--lr is 0.2 on " in answers[0][1] and ": rank 1, but 0.02 on " in answers[0][1]


def test_ranks_that_agree_go_on_to_the_next_check(pool):
    answers = pool.run(
        f"{__name__}:command", [*jobs.BASE, "--device", "auto", "--learning-rat"], (), ranks=2, timeout=100
    )
    assert [status for status, _ in answers] == [2, 2] and "--learning-rat" in answers[0][1]
    assert "see no usable GPU" not in answers[0][1]
