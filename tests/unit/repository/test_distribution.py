# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""What is in the source distribution, and in the wheel that is built from it."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BUILD = """
import os, sys, tarfile
from setuptools import build_meta
name = build_meta.build_sdist("..")
with tarfile.open(f"../{name}") as archive:
    archive.extractall("..", filter="data")
os.chdir("../" + name.removesuffix(".tar.gz"))
build_meta.build_wheel("..")
"""
FILES = "setup.py pyproject.toml MANIFEST.in README.md LICENSE CHANGELOG.md CITATION.cff SECURITY.md constraints.txt"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, and the wheel built from it alone."""
    folder = tmp_path_factory.mktemp("distribution")
    copy = folder / "repository"
    copy.mkdir()
    for name in FILES.split():
        shutil.copy(ROOT / name, copy)
    for name in ("megatron_async", "benchmarks", "tools", "docs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", BUILD], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_wheel_has_the_whole_package_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = {Path(name).name: archive.read(name).decode() for name in names if ".dist-info/" in name}
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "megatron_async").rglob("*") if path.is_file()}
    expected = {name for name in package if "__pycache__" not in name}
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert "megatron-async = megatron_async.cli.main:main" in metadata["entry_points.txt"]
    assert "LICENSE" in metadata and "License-Expression: Apache-2.0" in metadata["METADATA"]


def test_the_source_distribution_has_what_people_look_for(built: Path) -> None:
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert set(FILES.split()) <= names
    assert "docs/from-megatron.md" in names
