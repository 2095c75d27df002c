# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Pinned versions, and the licence line of every source file."""

import ast
import os
import re
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import megatron_async

ROOT = Path(__file__).resolve().parents[3]
LICENCE = "# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0"
GENERATED = {".git", ".venv", "runs", "build", "dist", "shared", "__pycache__"}


def repository_files() -> list[Path]:
    """Every file that a person wrote."""
    found = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in GENERATED and not name.endswith("_cache")]
        found += [Path(folder) / name for name in names]
    return found


def install_requires() -> list[Requirement]:
    """The requirements in setup.py, with those of the dev extra."""
    call = next(
        node
        for node in ast.walk(ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setup"
    )
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    texts = ast.literal_eval(keywords["install_requires"]) + ast.literal_eval(keywords["extras_require"])["dev"]
    return [Requirement(text) for text in texts]


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[^\s@/]+", pin) for pin in pins), "only exact pins from the index"
    return {canonicalize_name(name): pinned for name, pinned in (pin.split("==") for pin in pins)}


def test_constraints_pin_every_direct_requirement_within_its_range() -> None:
    pins = constraints()
    requirements = install_requires()
    assert len(requirements) > 10
    for requirement in requirements:
        pinned = pins.get(canonicalize_name(requirement.name))
        assert pinned is not None, f"{requirement} has no pin in constraints.txt"
        assert Version(pinned) in requirement.specifier, f"{requirement} excludes the pinned {pinned}"


def test_constraints_leave_torchs_own_pins_to_torch() -> None:
    assert [name for name in constraints() if name.startswith(("nvidia-", "cuda-")) or name == "triton"] == []


def test_the_version_is_the_same_everywhere() -> None:
    assert str(Version(megatron_async.__version__)) == megatron_async.__version__
    assert f"\nversion: {megatron_async.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None and newest.group(1) in ("Unreleased", megatron_async.__version__)


def test_the_licence_of_every_direct_requirement_is_listed() -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    listed = {name for row in re.findall(r"^\| (.+?) \|", page, re.MULTILINE) for name in row.split(", ")}
    assert {requirement.name for requirement in install_requires()} - listed == set()


def test_packages_of_the_tested_set_under_other_licences_are_named() -> None:
    """Under another than MIT, BSD and Apache-2.0, by the metadata of what is installed."""
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    usual = re.compile(
        r"MIT( License)?|Apache[- ](Software License|2\.0( License)?)|(3-Clause )?BSD( License|-[23]-Clause)?"
    )
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    other = []
    for name in pinned:
        try:
            fields = metadata.metadata(name)
        except metadata.PackageNotFoundError:
            continue  # an extra that is not installed
        classifiers = [text.split(" :: ")[-1] for text in fields.get_all("Classifier", []) if "License ::" in text]
        licence = (
            fields["License-Expression"] or " AND ".join(classifiers) or (fields["License"] or "").partition("\n")[0]
        )
        if not all(usual.fullmatch(part) for part in re.split(r" AND | OR ", licence)):
            other.append(name)
    assert "tqdm" in other and len(other) < 15
    assert [name for name in other if name not in page] == []


def test_every_source_file_starts_with_the_licence_line() -> None:
    names = {"Makefile", "Dockerfile", "run", "constraints.txt", "pyproject.toml"}
    sources = [
        path
        for path in repository_files()
        if path.suffix in {".py", ".sh", ".sbatch"} or (path.name in names and path.parent.name != "hooks")
    ]
    assert ROOT / "megatron_async" / "__init__.py" in sources
    missing = [
        str(path.relative_to(ROOT))
        for path in sources
        if path.stat().st_size > 0 and LICENCE not in path.read_text(encoding="utf-8").splitlines()[:2]
    ]
    assert missing == []


def test_the_image_has_every_folder_of_code_and_tests() -> None:
    copied = re.findall(r"^COPY (.+) \./\S*$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    sources = {name for line in copied for name in line.split()}
    assert {"setup.py", "pyproject.toml", "README.md"} <= sources
    assert [name for name in sources if not (ROOT / name).exists()] == []
    with_code = {path.relative_to(ROOT).parts[0] for path in repository_files() if path.suffix == ".py"}
    assert with_code - sources == set()
