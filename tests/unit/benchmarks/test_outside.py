# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Benchmarks are outside the package: not in the wheel, found by the tools, users of public names alone."""

import ast
import runpy
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


def private_names(source: str) -> list[str]:
    """Accesses to names with one underscore on anything but `self` and `cls`."""
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and ast.unparse(node.value) not in {"self", "cls", "argparse"}  # argparse exports no type of its groups
    ]


def test_private_names_are_found():
    assert private_names("self._own\nloop._steps.run()\nlist.__len__") == ["line 2: loop._steps"]


@pytest.mark.parametrize("path", sorted([*ROOT.glob("benchmarks/*.py"), *ROOT.glob("tools/**/*.py")]), ids=str)
def test_benchmarks_and_tools_use_public_names(path: Path):
    assert private_names(path.read_text()) == []


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--emulate-compute-ms 40", "must be two numbers F,B"),
        ("--emulate-compute-ms 30,0", "must be positive"),
        ("--emulate-compute-ms a,b", "must be two numbers"),
        ("--emulate-compute-ms 1,2,3", "must be two numbers"),
        ("--emulate-compute-ms=-1,2", "must be positive"),
        ("--emulate-compute-ms inf,1", "must be positive"),
        ("--emulate-compute-ms nan,1", "must be positive"),
        ("--rounds 0", "at least 1"),
        ("--contenders gpipe", "invalid choice: 'gpipe'"),
        ("--stages 3", "no cell of the set"),
    ],
)
def test_wrong_arguments_are_refused(arguments: str, complaint: str, capsys: pytest.CaptureFixture[str]):
    parse = runpy.run_path(str(ROOT / "tools" / "benchmark_schedules.py"))["parse"]
    with pytest.raises(SystemExit, match="2"):
        parse(["--json", "x", *arguments.split()])
    assert complaint in capsys.readouterr().err


def test_cells_are_chosen_by_size_and_compute():
    parse = runpy.run_path(str(ROOT / "tools" / "benchmark_schedules.py"))["parse"]
    line = (
        "--json x --cells full --stages 2 --microbatches 4 8 --compute emulated --emulate-compute-ms 30,60.5 --rounds 7"
    )
    settings = parse(line.split()).settings
    assert {(cell.stages, cell.microbatches) for cell in settings} == {(2, 4), (2, 8)}
    assert {(cell.pace.forward_ms, cell.pace.backward_ms) for cell in settings} == {(30.0, 60.5)}
    assert {cell.rounds for cell in settings} == {7}
