# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A rank that stays in an action: the others name it, at half of the timeout and when the first of them fails."""

import re
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest

from benchmarks.processes import JobFailed
from tests.distributed.jobs import BASE

TIMEOUT = 6.0
"""Seconds; the command line gives whole minutes."""
BATCH = 2


def train(arguments: Sequence[str], sleeper: int, seconds: float) -> None:
    """Train; one rank sleeps in a forward."""
    import torch.distributed as dist

    from megatron_async.config import arguments as command_line
    from megatron_async.platform import groups
    from megatron_async.training import run
    from megatron_async.training.callbacks import Callback

    class Sleeper(Callback):
        def on_action(self, kind: str, batch: int) -> None:
            if (dist.get_rank(), kind, batch) == (sleeper, "F", BATCH):
                time.sleep(seconds)

    initialize = run.initialize

    def and_shorten_the_limit(args: Any) -> None:
        initialize(args)
        args.distributed_timeout_minutes = TIMEOUT / 60

    limit = mock.patch.object(groups, "timeout", lambda: timedelta(seconds=TIMEOUT))
    with limit, mock.patch.object(run, "initialize", and_shorten_the_limit):
        loop = run.build(command_line.parse([*BASE, *arguments]), callbacks=[Sleeper()])
    loop.run()
    run.close()


@pytest.mark.parametrize(("ranks", "sleeper"), [(2, 0), (4, 2)])
def test_the_silent_rank_is_named_with_its_action(pool, ranks, sleeper):
    arguments = f"--optimizer adam --pipeline-schedule 2bw --pipeline-model-parallel-size {ranks}".split()
    with pytest.raises(JobFailed) as failure:
        pool.run(f"{__name__}:train", arguments, sleeper, 10 * TIMEOUT, ranks=ranks)
    said = " ".join(str(failure.value).split())
    named = rf"Longest silent: rank {sleeper} \(\S+\), F of batch {BATCH}\b"
    assert re.search(rf"no new action for \d+ s on rank \d\. {named}", said), said
    assert len(re.findall(rf"rank \d failed\. {named}", said)) == 1, said
