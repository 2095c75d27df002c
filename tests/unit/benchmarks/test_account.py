# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Where the time goes: what is timed is added to its part, once."""

import contextlib
import time
from types import SimpleNamespace

import pytest

from benchmarks import account
from benchmarks.training import Alone

PAUSE = 0.02


def pause(*_: object) -> None:
    time.sleep(PAUSE)


def test_each_part_gets_the_time_that_passes_in_it():
    @contextlib.contextmanager
    def span(kind, **labels):
        yield

    link = SimpleNamespace(send=pause, receive=pause)
    update = SimpleNamespace(apply=pause, start=pause, poll=pause)
    chunk = SimpleNamespace(update=update, data_iterator=None)
    steps = SimpleNamespace(
        chunks=[chunk],
        _executor=SimpleNamespace(_links=SimpleNamespace(forward=link, backward=SimpleNamespace(**vars(link)))),
    )
    metrics = SimpleNamespace(loss=pause, extra=pause, batch=pause)
    loop = SimpleNamespace(_steps=steps, metrics=metrics, timeline=SimpleNamespace(span=span))
    watched = account._Account(loop)
    for kind, times in (("F", 1), ("B", 2), ("U", 1)):
        for _ in range(times):
            with loop.timeline.span(kind, batch=0):
                pause()
    link.receive()
    update.start()
    update.poll()
    update.apply()
    metrics.batch(SimpleNamespace(elapsed=1.0))
    metrics.batch(SimpleNamespace(elapsed=2.0))
    first, second = watched.batches
    expected = {"forwards": 1, "backwards": 2, "waits": 1, "update": 1, "reductions": 2, "sends": 0, "data": 0}
    for part, times in expected.items():
        # A pause is at least as long as asked for, and on a busy machine longer.
        assert first[part] >= times * PAUSE * 1e3 and (times > 0 or first[part] == 0), part
        assert second[part] == 0, part
    assert (first[account.BATCH], second[account.BATCH]) == (1000.0, 2000.0)


def test_compute_alone_stands_beside_the_runs_of_the_slower_rank():
    run = {account.BATCH: 30.0} | dict.fromkeys(account.PARTS, 1.0)
    slower = run | {account.BATCH: 40.0}
    ranks = [
        {"limit": [Alone(9.0, 9.0, 2.0)], "2bw": [run]},
        {"limit": [Alone(8.0, 8.0, 1.0)], "2bw": [slower, slower]},
    ]
    found = account.medians(ranks)
    assert found["2bw"] == pytest.approx(slower)
    alone = {account.BATCH: 20.0, "forwards": 9.0, "backwards": 9.0, "update": 2.0}
    assert found["limit"] == pytest.approx(dict.fromkeys(account.PARTS, 0.0) | alone)
