# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The executor, links and updates of the package on simulated hosts and devices: speed, hangs, the simulator's model.

Nothing here was measured on a GPU.
"""

import random
from dataclasses import replace
from itertools import product

import pytest

from megatron_async import platform

platform.activate("cpu")

from benchmarks.device import POLICIES, Machine, StageTimes, simulate_device  # noqa: E402
from megatron_async.pipeline.executor import Executor  # noqa: E402
from megatron_async.pipeline.links import Link  # noqa: E402
from megatron_async.pipeline.update import DeferredUpdate, Launch  # noqa: E402
from megatron_async.schedules import SCHEDULES, make_schedule  # noqa: E402
from tests.device.pipeline import Run  # noqa: E402

TIMES = StageTimes(forward=20, backward=40, step=5, reduction=20, gather=10)
MACHINE = Machine(norm=1.0)
LAUNCHES = {"when-known": Launch.WHEN_KNOWN, "at-once": Launch.AT_ONCE}
DELAYED = ("2bw", "2bw-eager", "wpipe", "pipedream")


def run(name: str, stages: int, microbatches: int, launch: str, *, times=None, machine=MACHINE, **options) -> Run:
    return Run(name, stages, microbatches, LAUNCHES[launch], times or [TIMES] * stages, machine, **options).go()


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize(
    ("name", "stages", "factor"), [("2bw", 4, 1), ("2bw", 8, 1), ("2bw", 4, 2), ("2bw-eager", 4, 2)]
)
def test_updates_are_hidden(name, stages, factor, launch):
    assert run(name, stages, factor * stages, launch).ratio <= (1.02 if factor == 1 else 1.01)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_the_hosts_own_time_is_hidden(launch):
    """A millisecond for each action. A host that waits after R and U too takes 1.008."""
    assert run("2bw", 4, 4, launch, python=1.0).ratio <= 1.002


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize(("name", "stages", "microbatches"), [("2bw", 3, 4), ("2bw-eager", 3, 6), ("wpipe", 3, 6)])
def test_the_simulator_models_what_the_executor_does(name, stages, microbatches, launch):
    """Up to one step: the first one is never launched at once. The simulator leaves the sum for the log out."""
    found = run(name, stages, microbatches, launch)
    modeled = simulate_device(make_schedule(name, stages, microbatches, 6), TIMES, MACHINE, POLICIES[launch])
    assert found.hung == []
    for own, spans in zip(found.spans, modeled.spans, strict=True):
        assert [span.start for span in own] == pytest.approx(
            [spans[at][0] for at in sorted(spans)], abs=TIMES.step + 0.1
        )


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("name", DELAYED)
def test_uneven_replicas_do_not_hang(name, launch):
    draw = random.Random(f"{name} {launch}")
    times = [replace(TIMES, forward=draw.uniform(2, 38), backward=draw.uniform(4, 76)) for _ in range(2 * 3)]
    microbatches = SCHEDULES[name].least_microbatches(3)
    assert run(name, 3, microbatches, launch, times=times, segments=(1, 3, 2), at_use=1).hung == []


def test_one_hardware_queue_drains_the_pipeline_at_each_batch():
    assert run("2bw", 4, 4, "at-once", machine=replace(MACHINE, one_queue=True)).ratio > 1.4


def test_wpipe_hangs_with_one_hardware_queue():
    assert run("wpipe", 3, 5, "at-once", machine=replace(MACHINE, one_queue=True)).hung


def hangs(name: str, stages: int, microbatches: int, **options) -> list[tuple[int, int]]:
    """Ranks and numbers of their forwards and backwards in which a synchronization of the device hangs."""
    actions = 2 * microbatches * SCHEDULES[name].chunks * sum(options["segments"])
    return [
        place
        for place in product(range(stages), range(actions))
        if run(name, stages, microbatches, "when-known", synchronize=frozenset([place]), **options).hung
    ]


@pytest.mark.parametrize(
    ("name", "stages", "microbatches"), [("2bw", 3, 3), ("2bw-eager", 3, 5), ("wpipe", 3, 4), ("wpipe", 2, 3)]
)
def test_a_rank_may_synchronize_its_device_anywhere(name, stages, microbatches):
    assert hangs(name, stages, microbatches, segments=(2,)) == []


def test_a_first_receive_that_is_posted_ahead_would_hang(monkeypatch):
    """The fault of old, on these ranks in these forwards of the warm-up: they wait for a gradient that needs them."""

    def expect(self: Link, messages: int) -> None:
        self._expected += messages
        self._post()

    monkeypatch.setattr(Link, "expect", expect)
    found = hangs("2bw", 4, 4, segments=(1,))
    assert found == [(rank, number) for rank in range(3) for number in range(3 - rank)]


def test_wpipe_would_hang_without_its_receives_of_what_comes_round(monkeypatch):
    """The fault of old, in a first batch: rank 0 takes a message at its use, behind an action that needs the sender."""
    assert hangs("wpipe", 2, 3, segments=(1,), at_use=1) == []
    monkeypatch.setattr(Link, "post_due", lambda *_: None)
    assert hangs("wpipe", 2, 3, segments=(1,), at_use=1) == [(0, 5), (0, 7)]


@pytest.mark.parametrize("name", ["2bw", "2bw-eager", "wpipe"])
def test_neighbors_may_synchronize_at_the_same_time_in_the_first_batch(name):
    microbatches = SCHEDULES[name].least_microbatches(3)  # 3 for wpipe
    draw = random.Random(name)
    for _ in range(12):
        rank, other = draw.choice([(0, 1), (1, 2)])
        places = frozenset((one, draw.randrange(2 * microbatches)) for one in (rank, other))
        found = run(name, 3, microbatches, "when-known", synchronize=places, segments=(1, 1), at_use=1)
        assert found.hung == [], places


def hang_everywhere(name: str, replicas: int) -> list[int]:
    """Ranks of 2 stages that hang when they synchronize their device in every forward and backward."""
    actions = range(2 * 2 * SCHEDULES[name].chunks * 3)
    return [
        rank
        for rank in range(2 * replicas)
        if run(
            name,
            2,
            SCHEDULES[name].least_microbatches(2),
            "when-known",
            times=[TIMES] * (2 * replicas),
            segments=(3,),
            synchronize=frozenset(product([rank], actions)),
        ).hung
    ]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("name", ["2bw", "2bw-eager", "wpipe"])
def test_a_rank_may_synchronize_everywhere_while_updates_are_in_flight(name, replicas):
    assert hang_everywhere(name, replicas) == []


def test_collectives_that_the_host_launches_one_by_one_would_hang(monkeypatch):
    """The fault of old: the last stage waits for the norm of the first one, whose host waits for the last one."""
    make = DeferredUpdate.__init__

    def with_polled_chains(self, **arguments):
        make(self, **arguments)
        self._chains_at_once = False

    monkeypatch.setattr(DeferredUpdate, "__init__", with_polled_chains)
    assert hang_everywhere("2bw", 1) == [1]


def test_steps_that_no_host_launches_while_it_waits_would_hang(monkeypatch):
    """A rank waits for the gather of its replica, whose host waits for a stage that waits for a gather itself."""
    monkeypatch.setattr(Executor, "_poll_until", lambda *_, **__: None)
    assert hang_everywhere("2bw", 1) == []
    assert hang_everywhere("wpipe", 2) != []


class Never:
    """A setting that stays off."""

    def __get__(self, *_):
        return False

    def __set__(self, *_): ...


@pytest.mark.parametrize("launch", LAUNCHES)
def test_all_ranks_may_synchronize_everywhere_in_the_first_batch(launch, monkeypatch):
    """With norms at R the last stage waits for the norm of a stage that waits for the last one."""
    places = frozenset(product(range(5), range(2 * 2 * 5)))
    options = {"segments": (1,), "at_use": 1, "synchronize": places}
    assert run("wpipe", 5, 5, launch, **options).hung == []
    monkeypatch.setattr(DeferredUpdate, "all_at_update", Never(), raising=False)
    assert run("wpipe", 5, 5, launch, **options).hung != []


def random_run(seed: int) -> Run:
    """Uneven stages and replicas; one rank synchronizes at random, in the first batch all ranks do."""
    draw = random.Random(seed)
    name, stages, replicas = draw.choice(DELAYED), draw.choice((2, 3, 4)), draw.choice((1, 2))
    microbatches = SCHEDULES[name].least_microbatches(stages) + draw.randrange(stages + 1)
    ranks, reduction = range(stages * replicas), draw.choice((1, 20, 60))
    times = [
        replace(TIMES, forward=draw.uniform(2, 38), backward=draw.uniform(4, 76), reduction=reduction) for _ in ranks
    ]
    machine = replace(MACHINE, transfer=draw.choice((0, 0.5, 3)), launches=draw.choice((50, 400, 2000)))
    first, rest = (2 * microbatches * SCHEDULES[name].chunks * batches for batches in (1, 2))
    places = {place for place in product(ranks, range(first)) if draw.random() < 0.5}
    places |= set(product([draw.choice(ranks)], draw.sample(range(first, first + rest), draw.choice((1, 5, rest)))))
    options = {"times": times, "machine": machine, "segments": (1, 2), "at_use": 1, "synchronize": frozenset(places)}
    return run(name, stages, microbatches, draw.choice(list(LAUNCHES)), **options)


def test_random_runs_do_not_hang(monkeypatch):
    assert [seed for seed in range(30) if random_run(seed).hung] == []
    monkeypatch.setattr(Link, "post_due", lambda *_: None)
    assert [seed for seed in range(10) if random_run(seed).hung] != []
