# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""`megatron-async timeline`: a trace beside its plan, and the idle time by cause."""

import json

import pytest

from megatron_async.cli import timeline
from megatron_async.schedules import StageCosts, make_schedule, simulate
from megatron_async.schedules.figure import spans_of

COSTS = [StageCosts(10.0, 20.0, 3.0), StageCosts(12.0, 24.0, 3.0)]


def trace(path, schedule: str, stages: int, microbatches: int, transfer: float = 0.0):
    """A trace file of a simulated run of six batches."""
    table = make_schedule(schedule, stages, microbatches, 6)
    events = [
        {
            "ph": "X",
            "ts": 1000 * span.start,
            "dur": 1000 * (span.end - span.start),
            "pid": span.rank,
            "tid": span.rank,
            "args": {"kind": span.kind, "batch": span.batch, "chunk": span.chunk}
            | ({"microbatch": span.number} if span.kind in "FB" else {}),
        }
        for span in spans_of(table, simulate(table, COSTS[:stages], transfer=transfer))
        if span.kind != "R"
    ]
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    return path


@pytest.mark.parametrize("schedule", ["2bw", "wpipe"])
def test_causes_add_up_and_the_picture_is_written(tmp_path, capsys, schedule):
    path = trace(tmp_path / "trace.json", schedule, 2, 4, transfer=8.0)
    output = tmp_path / "timeline.png"
    assert timeline.main(["--trace", str(path), "--schedule", schedule, "--output", str(output)]) == 0
    lines = capsys.readouterr().out.splitlines()
    parts = {line[:28].strip(): float(line[28:].split()[0]) for line in lines[1:-1]}
    assert parts["compute"] == pytest.approx(4 * 33) and parts["imbalance"] == pytest.approx(4 * 3)
    assert parts["transfers, host and jitter"] > 0
    assert sum(parts.values()) == pytest.approx(float(lines[0].split()[2]), abs=0.5)
    assert output.read_bytes()[:4] == b"\x89PNG"


def test_costs_are_those_of_the_trace(tmp_path):
    spans = timeline.read_trace(trace(tmp_path / "trace.json", "2bw", 2, 2))
    for found, known in zip(timeline.measured_costs(spans, 1), COSTS, strict=True):
        own = (found.forward, found.backward, found.update)
        assert own == pytest.approx((known.forward, known.backward, known.update))


def test_another_file_is_refused(tmp_path, capsys):
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": []}', encoding="utf-8")
    for wrong in (path, tmp_path / "none.json", trace(tmp_path / "two.json", "2bw", 2, 2)):
        schedule = "wpipe" if wrong.name == "two.json" else "2bw"
        assert timeline.main(["--trace", str(wrong), "--schedule", schedule]) == 2
        assert f"--trace {wrong}: " in capsys.readouterr().err
