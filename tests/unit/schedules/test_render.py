# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Text, JSON, trace and pictures of a table."""

import json
import subprocess
import sys
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from megatron_async.schedules import Backward, Forward, StageCosts, make_schedule, simulate
from megatron_async.schedules.render import to_figure, to_image, to_json, to_text, to_timeline, to_trace


def simulated(name, stages, microbatches, batches, costs=None):
    schedule = make_schedule(name, stages, microbatches, batches)
    return schedule, simulate(schedule, costs or StageCosts(1.0, 2.0))


def test_timeline() -> None:
    assert to_timeline(*simulated("1f1b", 2, 2, 1)).splitlines() == [
        "rank 0 | F0 F1...... B0---... B1---*",
        "rank 1 |... F0 B0--- F1 B1---'.....^",
    ]
    assert to_timeline(*simulated("2bw", 2, 2, 3)).splitlines() == [
        "rank 0 | F0 F1...... B0--- F2 B1---'F3 B2---^F4 B3---'F5 B4---... B5---*",
        "rank 1 |... F0 B0--- F1 B1---'F2 B2--- F3 B3---*F4 B4--- F5 B5---*.....^",
    ]


def test_timeline_draws_updates_that_take_time() -> None:
    timeline = to_timeline(*simulated("wpipe", 2, 2, 2, StageCosts(1.0, 2.0, 0.5)))
    assert "F0.0" in timeline
    assert "U1.0" in timeline


def test_timeline_of_very_different_times_stays_short() -> None:
    timeline = to_timeline(*simulated("2bw", 2, 4, 3, StageCosts(0.001, 100.0)))
    assert max(map(len, timeline.splitlines())) < 4100


def test_text_shows_figures_of_merit_for_each_stage() -> None:
    lines = to_text(*simulated("wpipe", 4, 8, 4)).splitlines()
    assert lines[0] == "schedule wpipe: 4 stages, 8 micro-batches, 4 batches"
    assert ["0", "0.00%", "4", "2+1", "1+0"] in [line.split() for line in lines]
    assert ["3", "0.00%", "2.5", "2+1", "1+0"] in [line.split() for line in lines]
    assert "bubble share: 0.00% in steady state" in lines[-1]


@pytest.mark.parametrize(
    ("name", "delays", "versions"),
    [
        ("1f1b", [0, 0, 0], [1, 1, 1]),
        ("2bw", [1, 1, 1], [2, 2, 2]),
        ("wpipe", [1, 1, 1], [2, 2, 2]),
        ("pipedream", [2, 1, 0], [3, 2, 1]),
    ],
)
def test_json(name, delays, versions) -> None:
    schedule, result = simulated(name, 3, 4, 4)
    data = json.loads(json.dumps(to_json(schedule, result)))
    assert list(data) == ["schedule", "stages", "microbatches", "batches", "bubble_share", "stage"]
    assert (data["schedule"], data["stages"], data["microbatches"], data["batches"]) == (name, 3, 4, 4)
    assert data["bubble_share"] == result.steady_bubble_share
    assert [stage["gradient_delay"] for stage in data["stage"]] == delays
    assert [stage["weight_versions"] for stage in data["stage"]] == versions
    for stage, row, live in zip(data["stage"], schedule.actions, result.live_activations, strict=True):
        assert stage["live_activations"] == live
        assert len(stage["actions"]) == len(row)
        for fields, action in zip(stage["actions"], row, strict=True):
            expected = {"action": action.kind, "chunk": action.chunk}
            if isinstance(action, Forward | Backward):
                expected |= {"microbatch": action.microbatch, "version": action.version}
            else:
                expected |= {"batch": action.batch}
            assert fields == expected


def test_short_tables_show_the_delay_of_a_run_that_goes_on() -> None:
    data = to_json(*simulated("2bw", 2, 2, 1))
    assert [stage["gradient_delay"] for stage in data["stage"]] == [1, 1]


def test_trace() -> None:
    schedule, result = simulated("2bw", 3, 4, 3, StageCosts(1.0, 2.0, 0.5))
    events = json.loads(json.dumps(to_trace(schedule, result)))["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    instants = [event for event in events if event["ph"] == "i"]
    assert len(complete) == 3 * (2 * 12 + 3)
    assert {event["cat"] for event in instants} == {"R"}
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} == {
        "rank 0",
        "rank 1",
        "rank 2",
    }
    for rank in range(3):
        mine = [event for event in complete if event["tid"] == rank]
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in pairwise(mine))
    assert max(event["ts"] + event["dur"] for event in complete) == pytest.approx(1000 * result.makespan, rel=1e-12)


def test_png_and_svg() -> None:
    schedule, result = simulated("wpipe", 2, 2, 2)
    png = to_image(schedule, result, "png")
    assert png.startswith(b"\x89PNG\r\n")
    svg = to_image(schedule, result, "svg")
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    assert svg == to_image(schedule, result, "svg")


def test_figure_has_a_cell_for_every_action_that_takes_time() -> None:
    schedule, result = simulated("2bw", 2, 2, 3, StageCosts(1.0, 2.0, 1.0))
    (axes,) = to_figure(schedule, result).axes
    cells = {collection.get_label(): len(collection.get_paths()) for collection in axes.collections}
    assert cells["idle"] == schedule.stages
    assert (cells["forward"], cells["backward"], cells["update"]) == (2 * 6, 2 * 6, 2 * 3)
    texts = [text.get_text() for text in axes.texts]
    assert texts.count("5") == 4
    assert texts.count("U2") == 2
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["rank 0", "rank 1"]


def test_matplotlib_and_torch_stay_out_until_a_picture_is_asked_for() -> None:
    code = (
        "import sys; import megatron_async.schedules.render;"
        "print([name for name in ('matplotlib', 'torch', 'numpy', 'megatron') if name in sys.modules])"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"
