# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The doctor under a launcher: clocks and findings of all hosts. Hosts, and a clock that is wrong, are imitated."""

import os
import time
from unittest import mock

from megatron_async.doctor import job
from megatron_async.doctor.finding import Finding

AHEAD = {0: 0.0, 1: 0.0, 2: 3.0}
"""Seconds, by rank; ranks 0 and 1 are on one host."""


def gather() -> list[job.Host]:
    rank = int(os.environ["RANK"])
    name, now = "first" if rank < 2 else "second", time.time
    with (
        mock.patch.object(job.socket, "gethostname", lambda: name),
        mock.patch.object(job.time, "time", lambda: now() + AHEAD[rank]),
    ):
        return job.gather([Finding("torch", "OK", f"seen by rank {rank}")])


def test_hosts_and_clocks(pool):
    answers = pool.run(f"{__name__}:gather", ranks=3)
    assert answers[0] == answers[1] == answers[2]
    first, second = answers[0]
    assert (first.name, first.ranks, second.name, second.ranks) == ("first", (0, 1), "second", (2,))
    assert first.offset == 0.0 and second.uncertainty > 0.0
    assert abs(second.offset - 3.0) <= second.uncertainty
    assert [found.found for found in second.findings] == ["seen by rank 2"]
