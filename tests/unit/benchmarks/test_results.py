# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Tables of results, and the files that they are added to."""

from typing import Any

import pytest

from benchmarks import results, schedule_tables, whole

ROW = {
    "stages": 2,
    "microbatches": 4,
    "compute": "real",
    "setting": "real",
    "ms_median": 100.4,
    "ms_spread": 3.0,
    "ratio_to_limit": 1.02,
    "ratio_spread": 0.011,
}
MACHINE = {
    "date": "2026-01-02",
    "command": "a command",
    "commit": "abc",
    "processor": "AMD EPYC 7B13 Processor",
    "usable_cores": 2,
    "load_average": 0.1,
    "versions": {"torch": "9"},
}


def test_schedule_tables_have_contenders_down_and_micro_batches_across():
    rows = [ROW | {"contender": "2bw", "microbatches": 8}, ROW | {"contender": "limit"}]
    absent = [{"contender": "torch-zbv", "reason": "why", "stages": 2, "microbatches": 2, "setting": "real"}]
    text = schedule_tables.tables(rows, absent)
    assert "| contender | M = 4 | M = 8 |" in text
    assert "| limit | 100 ± 3, 1.02 ± 0.01 | - |" in text
    assert "| **2bw** | - | 100 ± 3, 1.02 ± 0.01 |" in text
    assert text.index("limit") < text.index("2bw")
    assert "- torch-zbv: why (P=2 M=2 real)" in text


def test_stages_and_settings_have_tables_and_panels_of_their_own():
    emulated = ROW | {"contender": "wpipe", "setting": "emulated", "compute": "emulated"}
    rows = [ROW | {"contender": "2bw"}, emulated, emulated | {"setting": "emulated, transfers 2 ms"}]
    assert schedule_tables.tables(rows, []).count("| contender | M = 4 |") == 3
    panels = schedule_tables.figure(rows).axes
    assert [panel.get_title() for panel in panels] == ["2 stages, real", "2 stages, emulated"]


def test_results_of_a_date_and_machine_share_a_file(tmp_path):
    first = results.write(tmp_path, MACHINE, "Schedules", "table one\n")
    second = results.write(tmp_path, MACHINE | {"command": "another"}, "Whole runs", "table two\n")
    assert first == second == tmp_path / "2026-01-02_2-core-epyc-7b13.md"
    text = first.read_text()
    for part in ("# 2026-01-02, 2-core-epyc-7b13\n", "## Schedules\n", "table one", "commit abc", "torch 9", "another"):
        assert text.count(part) >= 1
    assert text.index("table one") < text.index("## Whole runs") < text.index("table two")
    gpu = results.write(tmp_path, MACHINE | {"device": "NVIDIA H200"}, "Steps", "table\n")
    assert gpu.name == "2026-01-02_nvidia-h200.md"


def run_of(*batches: float, stops: list[float]) -> list[Any]:
    """One rank, one turn: each batch spends 2 ms in forwards, 5 in backwards, 1 in the update."""
    return [([(batch, 2.0, 5.0, 1.0) for batch in batches], stops)]


def test_a_run_is_summarized_on_its_slowest_rank():
    found = whole.summary([run_of(10.0, 20.0, 30.0, stops=[4.0, 6.0]), run_of(9.0, 9.0, 9.0, stops=[5.0])])
    parts = {"batch": 20.0, "quartiles": 10.0, "forwards": 2.0, "backwards": 5.0, "update": 1.0, "rest": 12.0}
    assert found == pytest.approx(parts | {"stop": 5.0})


def test_whole_runs_have_a_table_for_each_model_and_number_of_micro_batches():
    row = {"model": "tiny", "microbatches": 2, "speedup": 1.3, "bound": 1.4, "ratio_to_limit": 1.06}
    runs = {"limit": whole.summary([run_of(10.0, stops=[])]), "2bw": whole.summary([run_of(11.0, stops=[7.0])])}
    text = whole.tables([row | {"stages_ms": [{"forward": 1.0, "backward": 2.0, "update": 0.0}], "runs": runs}])
    assert "| run | batch | quartiles | forwards | backwards | update | rest | stop |" in text
    assert "| 2bw | 11.0 | 0.0 | 2.0 | 5.0 | 1.0 | 3.0 | 7.0 |" in text
    assert "1.30 times as fast" in text and "1 + 2 + 0 ms" in text
    slow, close = whole.missed(row)
    assert "1.30 x as fast as 1f1b, the bar is 0.97 x 1.40" in slow
    assert "1.06 x compute alone" in close
    assert whole.missed(row | {"speedup": 1.37, "ratio_to_limit": 1.04}) == []
