# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Benchmarks are outside the package: not in the wheel, found by the tools."""

import subprocess
import sys
from pathlib import Path

import pytest
from setuptools import find_packages  # also provides distutils

from distutils.core import run_setup  # isort: skip

ROOT = Path(__file__).resolve().parents[3]
TOOLS = [path.name for path in sorted((ROOT / "tools").glob("*.py")) if "from benchmarks" in path.read_text()]


def test_the_wheel_holds_the_package_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    packages = run_setup("setup.py", stop_after="init").packages
    assert "benchmarks" in find_packages(str(ROOT))
    assert "megatron_async.training" in packages
    assert {name.partition(".")[0] for name in packages} == {"megatron_async"}


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_finds_the_benchmarks_from_any_folder(tool: str, tmp_path: Path) -> None:
    """As in a clean clone: nothing of this repository is installed or on the path."""
    code = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0]); import benchmarks"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(ROOT / "tools" / tool)],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
