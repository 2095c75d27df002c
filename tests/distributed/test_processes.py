# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The pool of worker processes: what a job finds there, and what follows a failure."""

import os
import sys

import pytest

from benchmarks.processes import JobFailed, Pool


def place() -> tuple[str, str, set[int], bool]:
    return os.environ["RANK"], os.environ["MASTER_PORT"], os.sched_getaffinity(0), "megatron.core" in sys.modules


def print_rank() -> None:
    print("set up rank", os.environ["RANK"])


def fail_on_the_last_rank() -> None:
    print("about to fail")
    if os.environ["RANK"] == "1":
        raise ValueError("no such thing")


def test_ranks_share_a_port_that_no_other_job_has():
    with Pool(pinned=True) as pool:
        first, second = (pool.run(f"{__name__}:place", ranks=2) for _ in range(2))
    assert [rank for rank, *_ in first] == ["0", "1"]
    assert len({port for _, port, *_ in first}) == 1 and first[0][1] != second[0][1]
    assert all(len(cores) == 1 and imported for *_, cores, imported in first)


def test_a_failure_names_the_rank_and_shows_its_output():
    with Pool() as pool:
        with pytest.raises(JobFailed, match=r"on ranks \[1\](?s:.*)rank 1: failed(?s:.*)no such thing(?s:.*)about to"):
            pool.run(f"{__name__}:fail_on_the_last_rank", ranks=2)
        assert len(pool.run(f"{__name__}:place", ranks=2)) == 2


def test_set_up_comes_before_the_first_job():
    with Pool(f"{__name__}:print_rank") as pool:
        pool.run(f"{__name__}:place", ranks=1)
        with pytest.raises(JobFailed, match="about to fail") as failure:
            pool.run(f"{__name__}:fail_on_the_last_rank", ranks=2)
    assert "set up rank 1" in str(failure.value)
    assert "set up rank 0" not in str(failure.value)  # in an earlier job
