# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Tables of results, and their place in a document."""

from pathlib import Path

import pytest

from benchmarks import document, scale
from megatron_async.training.emulation import EmulatedCompute

ROW = {
    "stages": 2,
    "microbatches": 4,
    "setting": "real",
    "ms_median": 100.4,
    "ms_spread": 3.0,
    "ratio_to_limit": 1.02,
    "uneven": 0,
}
RESULT = {
    "machine": {
        "date": "2026-01-02",
        "command": "a command",
        "commit": "abc",
        "processor": "some CPU",
        "usable_cores": 2,
        "load_average": 0.1,
        "versions": {"torch": "9"},
    },
    "rows": [ROW | {"contender": "limit"}, ROW | {"contender": "2bw", "microbatches": 8, "uneven": 1}],
    "absent": [{"contender": "torch-zbv", "reason": "why", "stages": 2, "microbatches": 2, "setting": "real"}],
}


def test_schedule_tables_have_contenders_down_and_micro_batches_across():
    text = document.schedules(RESULT)
    assert "| contender | M = 4 | M = 8 |" in text
    assert "| limit | 100 ± 3, 1.02 | - |" in text
    assert "| **2bw** | - | 100 ± 3, ~1.02 |" in text
    assert "- torch-zbv: why (P=2 M=2 real)" in text
    assert "commit abc" in text and "a command" in text


def test_real_and_emulated_compute_have_tables_of_their_own():
    emulated = ROW | {"contender": "wpipe", "setting": "emulated, transfers 2 ms", "compute": "emulated"}
    result = RESULT | {"rows": [row | {"compute": "real"} for row in RESULT["rows"]] + [emulated]}
    real, sleeping = (document.of_kind(result, kind) for kind in ("real", "emulated"))
    assert [row["contender"] for row in real["rows"]] == ["limit", "2bw"] and len(real["absent"]) == 1
    assert [row["contender"] for row in sleeping["rows"]] == ["wpipe"] and sleeping["absent"] == []


def test_only_the_section_is_replaced(tmp_path):
    path = tmp_path / "doc.md"
    path.write_text("before\n<!-- begin x -->\nold\n<!-- end x -->\nafter\n")
    document.replace_section(path, "x", "new\n")
    assert path.read_text() == "before\n<!-- begin x -->\nnew\n<!-- end x -->\nafter\n"
    with pytest.raises(ValueError, match="begin y"):
        document.replace_section(path, "y", "new")


def test_delayed_schedules_are_refused_where_the_batch_is_too_small():
    (paper, *_) = scale.LAYOUTS
    found = {(item.devices, item.schedule): item for item in scale.estimates(paper, [64, 4096], scale.Assumptions())}
    assert found[64, "2bw"].step_s < found[64, "1f1b"].step_s
    assert found[64, "2bw"].memory_gb > found[64, "1f1b"].memory_gb
    assert "8" in found[4096, "2bw"].problem and found[4096, "1f1b"].step_s > 0


def test_emulated_times_are_two_positive_numbers():
    assert EmulatedCompute.parse("30,60.5") == EmulatedCompute(30.0, 60.5)
    for wrong in ("30", "30,0", "a,b", "1,2,3", "-1,2", "inf,1", "nan,1"):
        with pytest.raises(ValueError, match="must be"):
            EmulatedCompute.parse(wrong)


def test_the_page_has_a_section_for_each_part_of_whole_runs():
    page = (Path(__file__).parents[3] / "docs" / "measurements.md").read_text(encoding="utf-8")
    stage = {"forward": 1.0, "backward": 2.0, "update": 0.5}
    whole = {"model": "tiny", "microbatches": 2, "speedup": 1.4, "bound": 1.4, "ratio_to_limit": 1.0}
    cost = {"batch_ms": 10.0, "stop_ms": 1.0, "longer_ms": 2.0}
    result = {
        "whole": [whole | {"stages_ms": [stage, stage], "ms": {"limit": {"median": 1, "spread": 0, "batches": 3}}}],
        "features": {"tiny": {"limit": {"batch": 1.0, "update": 0.5}}},
        "memory": [],
        "steady": [
            [{"batch": 500, "tensors": 1, "tensor_bytes": 1, "python_bytes": 1, "handles": 1, "ms_median": 1.0}]
        ],
        "saves": {"costs": {"saves": cost}, "size": {"files": 101, "tensors": 100}},
    }
    for part, text in document.training(result).items():
        assert page.count(f"<!-- begin training-{part} -->") == 1 and "| ---" in text
