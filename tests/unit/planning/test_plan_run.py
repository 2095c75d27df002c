# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""tools/plan_run.py: layouts of one job, and one row for each number of devices and schedule."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[3] / "tools" / "plan_run.py"
RUN = "--device cpu --model tiny --global-batch-size 32 --micro-batch-size 4 --staleness-correction error-feedback"


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs the tool; returns its exit status, the rows of its table and the other lines."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.delenv("RANK", raising=False)
    spec = importlib.util.spec_from_file_location("plan_run", PATH)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "plan_run", tool)
    spec.loader.exec_module(tool)

    def run(options: str) -> tuple[int, list[list[str]], list[str]]:
        status = tool.main([*options.split(), "--", *RUN.split()])
        lines = capsys.readouterr().out.splitlines()
        rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
        return status, rows, [line for line in lines if line.startswith("not possible")]

    return run


def test_one_job_has_a_row_for_each_layout_the_fastest_first(table):
    status, rows, _ = table("--devices 4 --schedules 2bw")
    assert status == 0
    assert sorted(row[2] for row in rows) == ["1", "2", "4"]
    assert [row[:2] for row in rows] == [["4", "2bw"]] * 3
    seconds = [float(row[-1]) for row in rows]
    assert seconds == sorted(seconds)


def test_several_jobs_have_their_best_layout_and_refusals_are_named(table):
    status, rows, refused = table("--devices 2 4 --schedules 1f1b 2bw --largest-pipeline 2")
    assert status == 0
    assert [row[:2] for row in rows] == [["2", "1f1b"], ["2", "2bw"], ["4", "1f1b"], ["4", "2bw"]]
    assert refused == []
    status, rows, refused = table("--devices 16 --schedules 2bw --largest-pipeline 16")
    assert any("16 devices, 2bw, pipeline 16" in line for line in refused)
