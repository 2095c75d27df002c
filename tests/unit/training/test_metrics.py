# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
import json

from megatron_async.schedules.phases import Phases
from megatron_async.training.log import MetricsFile


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_new_file_begins_with_the_configuration(tmp_path):
    path = tmp_path / "folder" / "metrics.jsonl"
    file = MetricsFile(str(path), 0, {"seed": 1})
    file.write({"iteration": 1, "lm_loss": 2.5, "grad_norm": float("nan")})
    assert rows(path) == [{"config": {"seed": 1}}, {"iteration": 1, "lm_loss": 2.5, "grad_norm": None}]


def test_new_runs_keep_the_files_of_all_others(tmp_path):
    """A run that is killed before its first checkpoint begins again, and again."""
    path = tmp_path / "metrics.jsonl"
    for seed in (1, 2, 3, 4):
        MetricsFile(str(path), 0, {"seed": seed}).close()
    kept = [rows(path.with_name(f"metrics.jsonl{ending}")) for ending in (".old", ".old2", ".old3", "")]
    assert kept == [[{"config": {"seed": seed}}] for seed in (1, 2, 3, 4)]


def test_a_resumed_file_has_no_gap_and_no_double(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(str(path), 0, {"seed": 1})
    for iteration in range(1, 6):
        file.write({"iteration": iteration})
    file.close()
    with path.open("a") as torn:
        torn.write('{"iteration": 6, "lm_lo')
    resumed = MetricsFile(str(path), 3, {"seed": 2})
    resumed.write({"iteration": 4})
    assert rows(path) == [{"config": {"seed": 1}}, *({"iteration": number} for number in (1, 2, 3, 4))]


def test_the_test_loss_of_a_complete_run_is_written_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(str(path), 0, {})
    losses = [{"iteration": 1, "test_loss": 3.0}, {"iteration": 2, "lm_loss": 2.0}, {"iteration": 2, "test_loss": 2.5}]
    for row in losses:
        file.write(row)
    file.close()
    MetricsFile(str(path), 2, {}, complete=False).close()  # the run goes on: what it was at its end stays
    assert rows(path)[1:] == losses
    MetricsFile(str(path), 2, {}, complete=True).close()
    assert rows(path)[1:] == losses[:2]


def test_phases():
    phases = Phases(2, 6)
    assert [phases.synchronous(batch) for batch in range(8)] == [True, True, False, False, False, False, True, True]
    assert [phases.corrected(batch) for batch in range(8)] == [False, False, False, True, True, True, False, False]
    assert [phases.corrected(batch, from_first=True) for batch in range(8)] == [False] * 2 + [True] * 4 + [False] * 2
    assert [phases.versions(1)(batch) for batch in range(8)] == [0, 1, 2, 2, 3, 4, 6, 7]
    assert [phases.versions(3)(batch) for batch in range(8)] == [0, 1, 2, 2, 2, 2, 6, 7]
    assert phases.end_of_segment(0, 8) == 1 and phases.end_of_segment(2, 8) == 6 and phases.end_of_segment(2, 4) == 4
