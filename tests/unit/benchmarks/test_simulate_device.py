# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The command tools/simulate_device.py."""

import json
from pathlib import Path

import pytest

from tests.refusals import check_refused
from tools import simulate_device as tool


def test_table(capsys) -> None:
    assert tool.main(["--stages", "4", "--microbatches-per-stage", "1", "--policies", "host,at-once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| 2bw | 4 | 4 | host | many | 270.0 | 1.102 | gather +10.0, reduction +20.0, step -5.0 |"
    assert lines[4] == "| 2bw | 4 | 4 | at-once | many | 245.0 | 1.000 |  |"
    assert len(lines) == 7 and "needs at least 7 micro-batches" in lines[6]


def test_rows_as_json(capsys) -> None:
    arguments = ["--schedules", "2bw", "--stages", "2", "--times", "10,20,3", "--norm", "0", "--launches", "20"]
    assert tool.main([*arguments, "--reduction", "0", "--gather", "0", "--policies", "when-known", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["microbatches"], row["queues"]) for row in rows] == [(2, "many"), (2, "one"), (4, "many"), (4, "one")]
    assert rows[0]["compute_alone"] == 63.0
    assert sum(rows[0]["added"].values()) == pytest.approx(rows[0]["batch_time"] - 63.0, abs=1e-6)


def test_hangs_have_a_row(capsys) -> None:
    arguments = ["--schedules", "wpipe", "--stages", "4", "--microbatches-per-stage", "1", "--queues", "one"]
    assert tool.main([*arguments, "--policies", "at-once"]) == 0
    assert "hangs: rank 0 in " in capsys.readouterr().out


@pytest.fixture
def trace(tmp_path) -> Path:
    """Two batches of one micro-batch on two stages, as a run's trace has them."""
    events = [
        {"ph": "X", "ts": 0, "dur": time * 1000, "pid": stage, "tid": stage, "args": {"kind": kind, "batch": batch}}
        for stage in (0, 1)
        for kind, time in (("F", 10 + stage), ("B", 20), ("U", 2))
        for batch in (0, 1)
    ]
    path: Path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_the_commands_of_its_help_are_accepted(trace, monkeypatch) -> None:
    monkeypatch.chdir(trace.parent)
    commands = [line.split() for line in (tool.__doc__ or "").splitlines() if line.startswith("python tools/")]
    assert len(commands) > 1 and all(tool.parse_arguments(words[2:])[0] for words in commands)


def test_times_of_a_recorded_run(capsys, trace) -> None:
    arguments = ["--schedules", "2bw", "--trace", str(trace), "--microbatches-per-stage", "2"]
    assert tool.main([*arguments, "--policies", "at-once", "--queues", "many", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["stages"], row["compute_alone"]) == (2, 4 * 31 + 2)
    assert tool.main([*arguments, "--stages", "4"]) == 2
    assert "--stages 4: the trace has 2 stages" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (
            [
                "--schedules",
                "3bw",
                "--stages",
                "x",
                "--policies",
                "old",
                "--queues",
                "two",
                "--times",
                "1,2",
                "--wrong",
            ],
            [
                "--schedules '3bw': choose from 1f1b, 2bw",
                "--stages 'x': must be some whole numbers of at least 1",
                "--policies 'old': choose from host, at-once",
                "--queues 'two': choose from many, one",
                "--times '1,2': must be 3 numbers of at least 0",
                "unknown argument '--wrong'",
            ],
        ),
        (["--norm", "-1", "--launch", "inf", "--launches", "0"], ["--norm '-1'", "--launch 'inf'", "--launches '0'"]),
        (["--trace", "/no/such/file"], ["--trace /no/such/file: "]),
        (["--stages"], ["argument --stages: expected one argument"]),
    ],
)
def test_wrong_arguments_are_all_reported_with_status_2(capsys, arguments, messages) -> None:
    check_refused(capsys, tool.main, arguments, messages)


def test_a_trace_that_is_no_trace(capsys, tmp_path) -> None:
    for contents in ("[]", "{", '{"traceEvents": []}', '{"traceEvents": [1]}'):
        (tmp_path / "trace.json").write_text(contents)
        assert tool.main(["--trace", str(tmp_path / "trace.json")]) == 2
        assert "trace.json: " in capsys.readouterr().err
