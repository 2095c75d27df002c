# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""--help of the entry point and of every tool: exit status 0, no traceback, our options before Megatron's."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_async.config.parser import Parser

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ROOT / "tools", ROOT / "examples"
TOOLS = [
    str(path.relative_to(ROOT))
    for folder in FOLDERS
    for path in sorted(folder.rglob("*.py"))
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
]
# Neither torchrun's variables nor a terminal's width.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "COLUMNS")}


@pytest.fixture(scope="module")
def text() -> str:
    done = subprocess.run(
        [sys.executable, "-m", "megatron_async.pretrain", "--help"],
        capture_output=True,
        text=True,
        timeout=120,
        env=ENVIRONMENT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def test_our_groups_come_first(text):
    groups = re.findall(r"^(\w[\w -]*):$", text, re.MULTILINE)
    assert groups.index("examples") < groups.index("megatron_async") < groups.index("optimizers")
    assert groups[groups.index("optimizers") + 1] == "transformer configuration"
    assert groups.count("megatron_async") == 1 and len(groups) > 30


def test_our_group_is_short(text):
    own = text[: text.index("\noptimizers:")]
    assert "--pipeline-schedule" in own and "--staleness-correction" in own
    assert len(own.splitlines()) < 100


def test_megatrons_options_are_there_a_bare_percent_sign_too(text):
    assert "--tensor-model-parallel-size" in text
    assert "headroom (e.g. 1.10 = 10%)" in " ".join(text.split())


def test_under_torchrun_one_rank_prints(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    Parser(prog="x").print_help()
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("RANK", "0")
    Parser(prog="x").print_help()
    assert capsys.readouterr().out.startswith("usage: x")


# One process for all: importing torch takes seconds.
RUN_ALL = """
import contextlib, io, json, runpy, sys, traceback

results = {}
for tool in json.loads(sys.argv[1]):
    sys.argv = [tool, "--help"]
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            runpy.run_path(tool, run_name="__main__")
            status = "no exit"
        except SystemExit as end:
            status = end.code
        except BaseException:
            status = traceback.format_exc()
    results[tool] = [status, text.getvalue()]
print(json.dumps(results))
"""


def test_every_tool_has_help():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN_ALL, json.dumps(TOOLS)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env=ENVIRONMENT,
        check=True,
    )
    results = json.loads(done.stdout.splitlines()[-1])
    assert results.keys() == set(TOOLS) and len(TOOLS) > 10
    failed = {tool: status for tool, (status, _) in results.items() if status not in (0, None)}
    assert not failed
    silent = [tool for tool, (_, text) in results.items() if len(text) < 100 or "Traceback" in text]
    assert not silent
