# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Another minor version of Megatron-Core, or a newer emerging-optimizers, is refused before anything starts."""

import runpy
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from megatron_async import mcore, pretrain

INSTALLED = {"megatron-core": "0.19.2", "emerging-optimizers": "0.3.1"}


@pytest.fixture
def install(monkeypatch):
    """Pretend that packages have these versions; None is not installed."""

    def pretend(**versions):
        known = INSTALLED | {name.replace("_", "-"): version for name, version in versions.items()}

        def version(package):
            if known[package] is None:
                raise PackageNotFoundError(package)
            return known[package]

        monkeypatch.setattr(mcore, "version", version)

    return pretend


def test_the_installed_versions_are_accepted():
    mcore.check_versions()


@pytest.mark.parametrize("version", ["0.19.0", "0.19.7", "0.19.3rc1"])
def test_patch_releases_are_accepted(install, version):
    install(megatron_core=version)
    mcore.check_versions()


@pytest.mark.parametrize(
    ("package", "version", "tested"),
    [
        ("megatron-core", "0.18.5", ">=0.19,<0.20"),
        ("megatron-core", "0.20.0", ">=0.19,<0.20"),
        ("megatron-core", "1.0", ">=0.19,<0.20"),
        ("emerging-optimizers", "0.2.9", ">=0.3,<0.4"),
        ("emerging-optimizers", "0.4.0", ">=0.3,<0.4"),
        ("emerging-optimizers", None, ">=0.3,<0.4"),
    ],
)
def test_other_versions_are_refused(install, package, version, tested):
    install(**{package.replace("-", "_"): version})
    with pytest.raises(mcore.UnsupportedVersion) as refused:
        mcore.check_versions()
    message = str(refused.value)
    assert f"{package} {version or 'is not installed'}" in message
    assert f"tested with {tested}" in message and "pip install" in message


def test_the_entry_point_names_all_of_them_and_ends_with_status_2(install, capsys):
    install(megatron_core="0.20.1", emerging_optimizers="0.4.0")
    assert pretrain.main(["--device", "cpu", "--help"]) == 2
    written = capsys.readouterr()
    assert "megatron-core 0.20.1" in written.err and "emerging-optimizers 0.4.0" in written.err
    assert "nothing was started" in written.err and "Traceback" not in written.err and written.out == ""


@pytest.mark.parametrize(
    "line",
    [
        "benchmark_optimizers.py --json x",
        "convert_checkpoint.py to-hf --load x --save y",
        "document.py",
        "generate.py --load x --tokenizer y --prompt z",
        "plan_run.py --devices 2 -- --model tiny --device cpu",
    ],
)
def test_a_tool_ends_with_the_message_and_status_2(install, monkeypatch, capsys, line):
    install(megatron_core="0.20.1")
    tool, *words = line.split()
    monkeypatch.setattr(sys, "argv", [tool, *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(Path(__file__).parents[3] / "tools" / tool), run_name="__main__")
    assert ended.value.code == 2
    written = capsys.readouterr().err
    assert written.startswith(f"{tool}: megatron-core 0.20.1: ") and "Traceback" not in written


def test_the_package_requires_the_tested_ranges():
    setup = (Path(__file__).parents[3] / "setup.py").read_text()
    for _, _, requirement in mcore.TESTED:
        assert f'"{requirement}"' in setup
