# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The device simulator: hand-computed cases, equality with `simulate`, speed of the policies, hangs."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from benchmarks.device import (
    LEAST_BATCHES,
    POLICIES,
    DeviceResult,
    Machine,
    Policy,
    StageTimes,
    recorded_times,
    simulate_device,
)
from benchmarks.device.engine import COMPUTE, Device, Host, Meeting, Operation, Simulation
from megatron_async.schedules import Backward, Forward, Schedule, StageCosts, make_schedule, simulate
from megatron_async.schedules.dependencies import key_of, previous_stage

TIMES = StageTimes(forward=20, backward=40, step=5, reduction=20, gather=10)
NORM = 1.0
IDEAL = Machine(launch=0.0, launch_limit=None)

SETTINGS = [
    (name, policy, one_queue)
    for name in ("2bw", "2bw-eager", "wpipe", "pipedream")
    for policy in POLICIES
    for one_queue in (False, True)
    # These may hang, see below.
    if not (one_queue and name == "wpipe" and POLICIES[policy].launch in ("norm", "once"))
]
"""Schedules, policies, and whether there is one hardware queue."""


def run(name: str, stages: int, microbatches: int, policy: str | Policy, **machine) -> DeviceResult:
    schedule = make_schedule(name, stages, microbatches, LEAST_BATCHES)
    policy = POLICIES[policy] if isinstance(policy, str) else policy
    return simulate_device(schedule, TIMES, Machine(**{"norm": NORM, **machine}), policy)


def ratio(*arguments, **machine) -> float:
    result = run(*arguments, **machine)
    return result.batch_time / result.limit


# Hosts and devices


def device_of(simulation: Simulation, *, one_queue=False, launch_cost=0.0, launch_limit=None) -> Device:
    return Device(simulation, one_queue=one_queue, launch_cost=launch_cost, launch_limit=launch_limit)


def run_host(simulation: Simulation, device: Device, program) -> Host:
    """Run a program, a generator function of the host."""
    host = Host(device)
    host.begin(program(host))
    simulation.run()
    return host


@pytest.mark.parametrize(("cost", "end"), [(0.0, 10.0), (0.5, 10.0), (2.0, 21.0)])
def test_a_burst_takes_the_longer_of_launches_and_kernels(cost, end) -> None:
    """Ten kernels of 1 ms. The last one starts when it is launched."""
    simulation = Simulation()
    device = device_of(simulation, launch_cost=cost)
    burst = Operation(device, COMPUTE, "F", 10.0, 10)
    run_host(simulation, device, lambda host: host.launch(burst))
    assert (burst.start, burst.end) == (0.0, end)
    assert burst.starved == end - 10.0


def test_the_host_stops_where_the_queue_is_full() -> None:
    """Bursts of 10 kernels and 10 ms, at most 15 waiting launches: 5 kernels of a burst have room while it waits."""
    simulation = Simulation()
    device = device_of(simulation, launch_limit=15)
    times = []

    def program(host):
        for _ in range(3):
            yield from host.launch(Operation(device, COMPUTE, "F", 10.0, 10))
            times.append(simulation.now)

    run_host(simulation, device, program)
    assert times == pytest.approx([0.0, 5.0, 15.0])


@pytest.mark.parametrize(("one_queue", "end"), [(False, 20.0), (True, 51.0)])
def test_a_waiting_kernel_blocks_a_shared_queue(one_queue, end) -> None:
    """A kernel on a side stream waits for a collective that its other member joins at 30. Compute stands behind it."""
    simulation = Simulation()
    device, other = device_of(simulation, one_queue=one_queue), device_of(simulation)
    meeting = Meeting(2, latency=10.0)
    last = Operation(device, COMPUTE, "F", 10.0)

    def program(host):
        yield from host.launch(Operation(device, COMPUTE, "F", 10.0))
        collective = Operation(device, "norm", "norm", meeting=meeting)
        yield from host.launch(collective)
        yield from host.launch(Operation(device, "side", "step", 1.0), [collective])
        yield from host.launch(last)

    def late(host):
        yield 30.0
        yield from host.launch(Operation(other, "norm", "norm", meeting=meeting))

    late_host = Host(other)
    late_host.begin(late(late_host))
    run_host(simulation, device, program)
    # In one queue: 30 + 10 for the collective, 1 for the kernel, then 10. Otherwise 10 + 10.
    assert last.end == end
    assert last.queued == one_queue


def test_other_streams_take_the_device_from_compute() -> None:
    simulation = Simulation()
    device = device_of(simulation)
    burst, step = Operation(device, COMPUTE, "F", 10.0), Operation(device, "side", "step", 4.0)

    def program(host):
        yield from host.launch(burst)
        yield 3.0
        yield from host.launch(step)

    run_host(simulation, device, program)
    assert (step.start, step.end, burst.end, burst.stolen) == (3.0, 7.0, 14.0, 4.0)


def test_a_host_that_waits_for_a_message_that_never_comes() -> None:
    simulation = Simulation()
    device = device_of(simulation)

    def program(host):
        yield from host.launch(Operation(device, "receive F", "transfer", meeting=Meeting(2, 0.0)))
        yield from host.synchronize()

    assert not run_host(simulation, device, program).finished


def test_a_slow_host_sets_the_pace() -> None:
    """One stage: 4 x 2,000 launches of a batch, 313 of its update, 0.05 ms each."""
    result = run("2bw", 1, 4, "at-once", launch=0.05)
    assert result.batch_time == pytest.approx(0.05 * (8000 + 1 + 10 + 1 + 300 + 1))
    assert result.added == pytest.approx({"launch": result.batch_time, "compute": -240.0, "step": -5.0})


# Tables


@pytest.mark.parametrize("name", ["1f1b", "2bw", "2bw-eager", "wpipe", "pipedream"])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 2), (2, 3), (3, 7), (4, 8)])
@pytest.mark.parametrize("transfer", [0.0, 0.15])
def test_a_free_host_gives_the_times_of_simulate(name, stages, microbatches, transfer) -> None:
    schedule = make_schedule(name, stages, microbatches, 4, first_batch=1)
    costs = [StageCosts(1.0 + 0.3 * (rank % 3), 2.0 - 0.1 * rank) for rank in range(stages)]
    times = [StageTimes(forward=own.forward, backward=own.backward) for own in costs]
    expected = simulate(schedule, costs, transfer=transfer, reduction=0.4)
    machine = Machine(launch=0.0, launch_limit=None, transfer=transfer, norm=0.4)
    found = simulate_device(schedule, times, machine, POLICIES["at-once"])
    assert found.hung == {}
    # Some transfers of a ring are not hidden: their receives are posted for stages of equal times.
    tolerance = (0.05 if stages == 2 else 0.01) * expected.makespan if name == "wpipe" and transfer else 1e-9
    for rank, row in enumerate(schedule.actions):
        for position, action in enumerate(row):
            if isinstance(action, Forward | Backward):
                assert found.spans[rank][position] == pytest.approx(expected.spans[rank][position], abs=tolerance)


@pytest.mark.parametrize(("name", "policy", "one_queue"), SETTINGS)
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 3), (3, 5), (3, 6)])
def test_every_policy_keeps_the_dependencies(name, policy, one_queue, stages, microbatches) -> None:
    schedule = make_schedule(name, stages, microbatches, LEAST_BATCHES)
    machine = Machine(norm=NORM, transfer=0.3, one_queue=one_queue)
    result = simulate_device(schedule, TIMES, machine, POLICIES[policy])
    assert result.hung == {}
    assert result.batch_time >= result.limit * (1 - 1e-9)
    assert sum(result.added.values()) == pytest.approx(result.batch_time - result.limit, abs=1e-6)
    ends = {
        key_of(rank, action): result.spans[rank][position][1]
        for rank, row in enumerate(schedule.actions)
        for position, action in enumerate(row)
        if isinstance(action, Forward | Backward)
    }
    for rank, row in enumerate(schedule.actions):
        spans = [result.spans[rank][position] for position in sorted(result.spans[rank])]
        assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(spans))
        for position, action in enumerate(row):
            if isinstance(action, Forward | Backward):
                start, end = result.spans[rank][position]
                own = TIMES.forward if isinstance(action, Forward) else TIMES.backward
                assert end - start >= own / schedule.chunks - 1e-9
                if (source := previous_stage(schedule, rank, action)) is not None:
                    assert start >= ends[source] + 0.3 * (source[0] != rank) - 1e-9


# Speed


@pytest.mark.parametrize(("name", "factor", "bar"), [("2bw", 1, 1.02), ("2bw", 2, 1.01), ("2bw-eager", 2, 1.01)])
@pytest.mark.parametrize(
    ("policy", "one_queue", "stages"),
    [("at-once", False, 4), ("at-once", False, 8), ("at-once", False, 16), ("when-known", False, 4)]
    + [("when-known", False, 8), ("layers", True, 4), ("layers", True, 8)],
)
def test_updates_are_hidden(name, factor, bar, policy, one_queue, stages) -> None:
    assert ratio(name, stages, factor * stages, policy, one_queue=one_queue) <= bar


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("policy", ["at-once", "when-known"])
def test_any_update_that_fits_into_the_slack_is_hidden(seed, policy) -> None:
    """The slack on stage 0 is one slot of 60 ms at M = P."""
    draw = random.Random(seed).uniform
    times = replace(TIMES, step=draw(2, 8), reduction=draw(2, 30), gather=draw(1, 12))
    machine = Machine(norm=draw(0.2, 2), step_launches=round(draw(100, 700)))
    result = simulate_device(make_schedule("2bw", 4, 4, LEAST_BATCHES), times, machine, POLICIES[policy])
    assert result.batch_time == pytest.approx(result.limit, rel=1e-6)


@pytest.mark.parametrize(("stages", "microbatches"), [(4, 4), (4, 8), (8, 8), (8, 16)])
def test_with_the_step_at_the_update_the_gather_is_exposed(stages, microbatches) -> None:
    """On the last stage R(b+1) precedes U(b), so the gather stands behind the reduction of the next batch.

    The step runs beside the reduction: 20 - 5 + 10 ms are added.
    """
    result = run("2bw", stages, microbatches, "host")
    assert result.batch_time - result.limit == pytest.approx(25.0)
    assert {name: time for name, time in result.added.items() if abs(time) > 0.1} == pytest.approx(
        {"reduction": 20.0, "gather": 10.0, "step": -5.0}
    )


@pytest.mark.parametrize("norm", [15.0, 50.0])
def test_polls_of_a_host_that_runs_ahead_expose_the_norm(norm) -> None:
    """At M = P, the norm that is polled stands behind all queued compute, so all of it is exposed.

    Then the host launches the step: 300 launches of 5 us. On a side stream, one slot of 60 ms hides the reduction of
    20 ms and the norm.
    """
    schedule, machine = make_schedule("2bw", 4, 4, LEAST_BATCHES), Machine(norm=norm)
    times = StageTimes(forward=20, backward=40, reduction=20)
    host = simulate_device(schedule, times, machine, POLICIES["host"])
    assert host.added["norm"] == pytest.approx(norm)
    assert host.batch_time == pytest.approx(host.limit + norm + 300 * 0.005)
    at_once = simulate_device(schedule, times, machine, POLICIES["at-once"])
    assert at_once.batch_time == pytest.approx(at_once.limit + max(0.0, 20 + norm - 60))


def test_one_queue_must_not_hold_what_waits() -> None:
    """Launched at R, the norm and the step drain the pipeline at each batch."""
    result = run("2bw", 4, 4, "at-once", one_queue=True)
    assert result.batch_time > 1.5 * result.limit
    assert result.added["compute"] > 100 and result.added["queue"] > 20


def test_wpipe_hangs_where_one_queue_holds_what_waits() -> None:
    """The norms of the two chunks wait in each other's queues."""
    schedule = make_schedule("wpipe", 3, 5, 3)
    found = {
        (policy, one_queue): bool(
            simulate_device(schedule, TIMES, Machine(norm=NORM, one_queue=one_queue), POLICIES[policy]).hung
        )
        for policy in ("at-once", "when-known")
        for one_queue in (False, True)
    }
    assert [key for key, hung in found.items() if hung] == [("at-once", True)]


def replicas_of(seed: int, stages: int, spread: float = 0.9) -> list[StageTimes]:
    """Two pipelines with stages of different speed."""
    draw = random.Random(seed).uniform
    return [
        replace(TIMES, forward=20 * draw(1 - spread, 1 + spread), backward=40 * draw(1 - spread, 1 + spread))
        for _ in range(2 * stages)
    ]


def test_equal_replicas_are_as_fast_as_one() -> None:
    schedule = make_schedule("2bw", 3, 4, LEAST_BATCHES)
    for policy in ("when-known", "at-once"):
        one = simulate_device(schedule, TIMES, Machine(norm=NORM), POLICIES[policy])
        both = simulate_device(schedule, [TIMES] * 6, Machine(norm=NORM), POLICIES[policy])
        assert both.batch_time == pytest.approx(one.batch_time)
        assert both.spans == one.spans * 2


def test_replicas_wait_for_the_slowest() -> None:
    schedule = make_schedule("2bw", 2, 4, LEAST_BATCHES)
    slow = replace(TIMES, forward=30, backward=60)
    result = simulate_device(schedule, [TIMES, TIMES, slow, TIMES], Machine(norm=NORM), POLICIES["when-known"])
    assert result.batch_time == pytest.approx(result.limit) == pytest.approx(4 * 90 + 5)


@pytest.mark.parametrize("name", ["2bw", "2bw-eager", "wpipe", "pipedream"])
@pytest.mark.parametrize("policy", ["when-known", "at-once"])
@pytest.mark.parametrize("seed", range(4))
def test_uneven_replicas_do_not_hang_where_each_stream_has_a_queue(name, policy, seed) -> None:
    """Reductions, norms and the gathers inside steps are launched at moments that differ between replicas."""
    microbatches = 1 if name == "pipedream" else 2 * 3 - 1 + seed
    schedule = make_schedule(name, 3, microbatches, LEAST_BATCHES)
    assert simulate_device(schedule, replicas_of(seed, 3), Machine(norm=NORM), POLICIES[policy]).hung == {}


@pytest.mark.parametrize(
    ("name", "stages", "policy", "seed"),
    [
        # A second send stands at the head of the queue until the first one is taken, and before the norm that the
        # receiver waits for.
        ("wpipe", 4, "polled", 16),
        # The same, where the host waits for the norm before it posts the receive.
        ("2bw-eager", 2, "settle", 4),
    ],
)
def test_uneven_replicas_can_hang_with_one_queue(name, stages, policy, seed) -> None:
    schedule = make_schedule(name, stages, 5, LEAST_BATCHES)
    times = [
        replace(own, reduction=random.Random(seed + at).choice([1, 20, 60]))
        for at, own in enumerate(replicas_of(seed, stages))
    ]
    hung = [
        bool(
            simulate_device(
                schedule, times, Machine(norm=NORM, transfer=0.5, launches=200, one_queue=one_queue), POLICIES[policy]
            ).hung
        )
        for one_queue in (False, True)
    ]
    assert hung == [False, True]


def test_a_step_of_more_launches_than_the_queue_holds_must_not_be_launched_early() -> None:
    """Launched at R, it stops the host until the norm of all stages is there."""
    assert ratio("2bw", 4, 4, "at-once", step_launches=900) == pytest.approx(1.0)
    assert ratio("2bw", 4, 4, "at-once", step_launches=2000) > 1.5
    assert ratio("2bw", 4, 4, "when-known", step_launches=2000) == pytest.approx(1.0)


@pytest.mark.parametrize(("stages", "microbatches"), [(4, 8), (8, 16)])
def test_transfers(stages, microbatches) -> None:
    """2bw exposes 2 (P-1) / P transfers for each micro-batch; 2bw-eager none. Both expose two of late receives."""

    def added(name: str, policy: Policy) -> float:
        result = run(name, stages, microbatches, policy, transfer=1.0)
        return result.batch_time - result.limit

    ahead, at_use = POLICIES["at-once"], replace(POLICIES["at-once"], post_ahead=False)
    assert added("2bw", ahead) == pytest.approx(2 * (stages - 1) / stages * microbatches)
    assert added("2bw-eager", ahead) == pytest.approx(0.0, abs=1e-6)
    assert added("2bw", at_use) == pytest.approx(2 * microbatches)
    assert added("2bw-eager", at_use) == pytest.approx(2 * microbatches)


# Hangs


def hangs(schedule: Schedule, policy: Policy, **machine) -> list[tuple[int, str]]:
    """The forwards and backwards in which a synchronization of one rank hangs."""
    return [
        (rank, str(action))
        for rank, row in enumerate(schedule.actions)
        for position, action in enumerate(row)
        if isinstance(action, Forward | Backward)
        and simulate_device(schedule, TIMES, Machine(norm=NORM, **machine), policy, synchronize=(rank, position)).hung
    ]


@pytest.mark.parametrize("policy", ["host", "at-once"])
def test_a_synchronization_under_posted_receives_hangs_in_the_warm_up(policy) -> None:
    found = hangs(make_schedule("2bw", 4, 4, 2), POLICIES[policy])
    assert found == [(rank, f"F0.{number}@v0") for rank in range(3) for number in range(3 - rank)]


@pytest.mark.parametrize("name", ["2bw", "wpipe"])
@pytest.mark.parametrize("one_queue", [False, True], ids=["many queues", "one queue"])
def test_receives_at_their_use_do_not_hang(name, one_queue) -> None:
    """A drained first batch."""
    policy = replace(POLICIES["when-known"], post_ahead=False)
    assert hangs(make_schedule(name, 4, 4, 1), policy, one_queue=one_queue) == []


def test_a_hang_names_the_actions() -> None:
    schedule = make_schedule("2bw", 2, 2, 2)
    result = simulate_device(schedule, TIMES, Machine(), POLICIES["at-once"], synchronize=(0, 0))
    assert {rank: str(action) for rank, action in result.hung.items()} == {0: "F0.0@v0", 1: "B0.0@v0"}
    assert result.batch_time is None and result.added == {}


# Recorded times


def trace_of(durations: dict[tuple[int, str], list[float]], batches=3) -> dict:
    """Spans of F, B and U as `training/profiling.py` writes them; the first batch takes ten times as long."""
    return {
        "traceEvents": [
            {
                "name": kind,
                "ph": "X",
                "ts": 0.0,
                "dur": time * 1000 * (10 if batch == 4 else 1),
                "pid": stage,
                "tid": stage,
                "args": {"kind": kind, "batch": batch, "chunk": 0},
            }
            for (stage, kind), times in durations.items()
            for batch in range(4, 4 + batches)
            for time in times
        ]
    }


def test_medians_of_a_recorded_run() -> None:
    durations = {(0, "F"): [1, 2, 30], (0, "B"): [4, 4], (0, "U"): [5], (1, "F"): [3], (1, "B"): [6, 8], (1, "U"): [7]}
    first, second = recorded_times(trace_of(durations), reduction=2.5, gather=1.5)
    assert first == StageTimes(forward=2, backward=4, step=5, reduction=2.5, gather=1.5)
    assert second == StageTimes(forward=3, backward=7, step=7, reduction=2.5, gather=1.5)
    recorded = recorded_times(trace_of({**durations, (0, "R"): [9]}), reduction=2.5)
    assert [own.reduction for own in recorded] == [9, 2.5]


def test_chunks_of_a_recorded_run_are_added() -> None:
    trace = trace_of({(0, kind): [4] for kind in "FBU"})
    trace["traceEvents"] += [
        {**event, "dur": 3000.0, "args": {**event["args"], "chunk": 1}} for event in trace["traceEvents"]
    ]
    assert recorded_times(trace) == [StageTimes(forward=7, backward=7, step=7)]


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        ({}, "not a trace file"),
        ({"traceEvents": []}, "spans of stages"),
        (trace_of({(0, "F"): [1], (0, "B"): [1]}), "stage 0 has no U"),
        (trace_of({(1, kind): [1] for kind in "FBU"}), r"spans of stages \[1\]"),
        (trace_of({(0, kind): [1] for kind in "FBU"}, batches=1), "without its first batch"),
    ],
)
def test_incomplete_traces_are_refused(trace, message) -> None:
    with pytest.raises(ValueError, match=message):
        recorded_times(trace)


def test_a_wrong_number_of_times_is_refused() -> None:
    with pytest.raises(ValueError, match="times of 3 ranks for 2 stages: give one for each, or a multiple"):
        simulate_device(make_schedule("2bw", 2, 2, 2), [TIMES] * 3, Machine(), POLICIES["at-once"])
