# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Set-up: `tools/find_python.sh` and `make setup`."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megatron_async.platform.packages import FLASH_LINEAR_ATTENTION, TRANSFORMER_ENGINE
from tests.unit.repository.commands import write_command

ROOT = Path(__file__).resolve().parents[3]


def find_python(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script with only `tmp_path/bin` on PATH."""
    variables = {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path / "home"), **environment}
    return subprocess.run(
        ["/bin/bash", ROOT / "tools" / "find_python.sh"],
        env=variables,
        capture_output=True,
        text=True,
        timeout=30,
    )


def fake_python(folder: Path, name: str, minor: int, path: str) -> None:
    """An interpreter 3.`minor` that answers the script's probe as a real one would."""
    answer = f"echo {minor} {path}" if minor >= 12 else "exit 1"
    write_command(folder, name, answer)


SHIM_THAT_FAILS = "echo 'pyenv: python3.12: command not found' >&2; exit 127"


def test_find_python_takes_a_real_interpreter(tmp_path: Path) -> None:
    write_command(tmp_path / "bin", "python3", f'exec "{sys.executable}" "$@"')
    found = find_python(tmp_path)
    assert found.returncode == 0, found.stderr
    asked = subprocess.run(
        [found.stdout.strip(), "-c", "import sys; print(sys.version_info >= (3, 12))"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert asked.stdout.strip() == "True"


def test_find_python_passes_over_a_shim_that_fails_and_an_old_interpreter(tmp_path: Path) -> None:
    write_command(tmp_path / "bin", "python3.12", SHIM_THAT_FAILS)
    fake_python(tmp_path / "bin", "python3", 11, "/never")
    fake_python(tmp_path / "home" / ".pyenv" / "versions" / "3.12.1" / "bin", "python", 12, "/the/pyenv/one")
    assert find_python(tmp_path).stdout.strip() == "/the/pyenv/one"


def test_find_python_looks_in_pyenv_root(tmp_path: Path) -> None:
    fake_python(tmp_path / "pyenv" / "versions" / "3.13.0" / "bin", "python", 13, "/from/root")
    assert find_python(tmp_path, PYENV_ROOT=str(tmp_path / "pyenv")).stdout.strip() == "/from/root"


def test_find_python_prefers_the_tested_version(tmp_path: Path) -> None:
    fake_python(tmp_path / "bin", "python3.14", 14, "/fourteen")
    fake_python(tmp_path / "bin", "python3.13", 13, "/thirteen")
    fake_python(tmp_path / "home" / ".pyenv" / "versions" / "3.12.9" / "bin", "python", 12, "/twelve")
    assert find_python(tmp_path).stdout.strip() == "/twelve"


def test_find_python_tries_every_folder_of_path(tmp_path: Path) -> None:
    write_command(tmp_path / "bin", "python3.12", SHIM_THAT_FAILS)
    fake_python(tmp_path / "second", "python3.12", 12, "/second")
    found = find_python(tmp_path, PATH=f"{tmp_path / 'bin'}:{tmp_path / 'second'}")
    assert found.stdout.strip() == "/second"


def test_find_python_without_any_says_what_to_install(tmp_path: Path) -> None:
    write_command(tmp_path / "bin", "cat", 'exec /bin/cat "$@"')
    fake_python(tmp_path / "bin", "python3", 11, "/never")
    found = find_python(tmp_path)
    assert found.returncode == 2
    assert found.stdout == ""
    assert "apt install python3.12 python3.12-venv" in found.stderr
    assert "PYTHON=" in found.stderr


def test_find_python_honours_python_and_does_not_replace_a_wrong_one(tmp_path: Path) -> None:
    fake_python(tmp_path / "bin", "python3.12", 12, "/found/by/search")
    fake_python(tmp_path / "own", "mine", 13, "/own/mine")
    fake_python(tmp_path / "own", "old", 11, "/own/old")
    assert find_python(tmp_path, PYTHON=str(tmp_path / "own" / "mine")).stdout.strip() == "/own/mine"
    refused = find_python(tmp_path, PYTHON=str(tmp_path / "own" / "old"))
    assert refused.returncode == 2
    assert str(tmp_path / "own" / "old") in refused.stderr


FAKE_INTERPRETER = """#!/bin/sh
log=LOG
case "$*" in
    -c*) echo 12 "$0" ;;
    "-m venv --clear .venv")
        echo venv >>"$log"
        rm -rf .venv && mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    "-m pip --version") ;;
    "-m pip install "*--no-build-isolation*"[gpu]") echo gpu >>"$log"; exit "${GPU_STATUS:-0}" ;;
    "-m pip install "*" wheel ninja") echo tools >>"$log" ;;
    "-m pip install "*) echo install >>"$log"; exit "${PIP_STATUS:-0}" ;;
    *) exit 9 ;;
esac
"""


@pytest.fixture
def bare_copy(tmp_path: Path) -> Path:
    """A copy of the files that set-up reads, and an interpreter that installs nothing."""
    copy = tmp_path / "copy"
    (copy / "tools").mkdir(parents=True)
    for name in ("Makefile", "setup.py", "constraints.txt", "pyproject.toml", "tools/find_python.sh"):
        shutil.copy(ROOT / name, copy / name)
    interpreter = tmp_path / "interpreter"
    interpreter.write_text(FAKE_INTERPRETER.replace("LOG", str(tmp_path / "log")), encoding="utf-8")
    interpreter.chmod(0o755)
    return copy


def make_setup(copy: Path, *options: str, **environment: str) -> tuple[int, list[str]]:
    """Exit status, and the commands that the interpreter got."""
    log = copy.parent / "log"
    log.write_text("", encoding="utf-8")
    variables = {"PATH": "/usr/bin:/bin", "PYTHON": str(copy.parent / "interpreter"), **environment}
    done = subprocess.run(
        ["make", "setup", *options], cwd=copy, env=variables, capture_output=True, text=True, timeout=30
    )
    return done.returncode, log.read_text(encoding="utf-8").split()


def test_set_up_runs_once(bare_copy: Path) -> None:
    assert make_setup(bare_copy) == (0, ["venv", "install"])
    assert make_setup(bare_copy) == (0, [])


def test_changed_requirements_are_installed_into_the_same_environment(bare_copy: Path) -> None:
    make_setup(bare_copy)
    later = time.time() + 10
    os.utime(bare_copy / "constraints.txt", (later, later))
    assert make_setup(bare_copy) == (0, ["install"])


def test_a_set_up_that_was_cut_off_starts_afresh(bare_copy: Path) -> None:
    status, asked = make_setup(bare_copy, PIP_STATUS="1")
    assert status != 0
    assert asked == ["venv", "install"]
    assert make_setup(bare_copy) == (0, ["venv", "install"])
    assert make_setup(bare_copy) == (0, [])


def test_packages_of_a_gpu_machine_come_after_torch_and_only_where_asked_for(bare_copy: Path) -> None:
    assert make_setup(bare_copy) == (0, ["venv", "install"])
    status, asked = make_setup(bare_copy, "GPU=1", GPU_STATUS="1")
    assert status != 0 and asked == ["tools", "gpu"]
    assert make_setup(bare_copy, "GPU=1") == (0, ["tools", "gpu"])
    assert make_setup(bare_copy, "GPU=1") == (0, [])


def test_the_extra_asks_for_the_versions_that_a_run_asks_for() -> None:
    text = (ROOT / "setup.py").read_text(encoding="utf-8")
    for package in (TRANSFORMER_ENGINE, FLASH_LINEAR_ATTENTION):
        (requirement,) = re.findall(rf'"({package.name}[^"]*)"', text)
        assert Requirement(requirement).specifier == SpecifierSet(package.fits)


def test_set_up_without_an_interpreter_fails_before_it_makes_anything(bare_copy: Path) -> None:
    status, asked = make_setup(bare_copy, PYTHON="/no/such/python")
    assert (status, asked) == (2, [])
    assert not (bare_copy / ".venv").exists()
