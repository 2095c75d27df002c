# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Atomic writes leave the old file or the new one; JSON lines tolerate a line that was cut off."""

import json
from pathlib import Path

import pytest

from megatron_async import files


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "summary.json"
    files.write_atomically(path, "old")

    def refuse(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(files.os, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        files.write_atomically(path, b"new")
    assert path.read_text(encoding="utf-8") == "old"
    assert [entry.name for entry in path.parent.iterdir()] == ["summary.json"]


def test_obstacles_are_found_before_hours_of_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert files.obstacle(tmp_path / "new" / "deeper" / "file") is None and files.obstacle(tmp_path / "file") is None
    assert files.obstacle(tmp_path) == "it is a folder"
    assert files.obstacle(tmp_path / "file" / "deeper") == f"{tmp_path / 'file'} is a file"
    monkeypatch.setattr(files.os, "access", lambda *_: False)
    assert files.obstacle(tmp_path / "new" / "file") == f"{tmp_path} cannot be written to"


def test_an_error_of_the_writer_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    path.write_text("old")
    with pytest.raises(RuntimeError), files.replacing(path) as temporary:
        assert temporary.suffix == ".png" and temporary.parent == tmp_path
        temporary.write_text("half of it")
        raise RuntimeError
    assert [entry.name for entry in tmp_path.iterdir()] == ["plot.png"] and path.read_text() == "old"


def test_sync_comes_before_the_new_name_and_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    replace, sync = files.os.replace, files.os.fsync
    monkeypatch.setattr(files.os, "replace", lambda *paths: (calls.append("rename"), replace(*paths)))
    monkeypatch.setattr(files.os, "fsync", lambda descriptor: (calls.append("fsync"), sync(descriptor)))
    files.write_atomically(tmp_path / "file", "text", sync=True)
    assert calls == ["fsync", "rename", "fsync"]


def test_lines_are_on_the_disk_at_once_and_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = files.JsonLines(path, [{"config": {"seed": 1}}])
    lines.write({"loss": float("nan"), "layers": {"1": [float("inf"), 0.5]}})
    assert files.read_json_lines(path) == [{"config": {"seed": 1}}, {"loss": None, "layers": {"1": [None, 0.5]}}]
    json.loads(path.read_text().splitlines()[1], parse_constant=lambda name: pytest.fail(name))


@pytest.mark.parametrize("cut", ['{"iteration": 2', '{"iteration": 2}', "\0\0"])
def test_a_last_line_without_its_end_is_left_out(tmp_path: Path, cut: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"iteration": 1}\n\n' + cut)
    assert files.read_json_lines(path) == [{"iteration": 1}]


@pytest.mark.parametrize("broken", ['{"iteration": 3, "lm_l', "[1]", "null"])
def test_a_broken_line_is_named(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"iteration": 1}\n' + broken + '\n{"iteration": 3}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2: "):
        files.read_json_lines(path)
