# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The structure of the package: imports go one way, names stay in their rooms, files and functions stay small."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_async.schedules import SCHEDULES

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_async"

LAYERS = (
    ("files", "launcher"),
    ("schedules",),
    ("mcore",),
    ("platform",),
    ("models", "data"),
    ("optim",),
    ("pipeline",),
    ("checkpoint",),
    ("reference",),
    ("planning",),
    ("training",),
    ("config",),
    ("pretrain",),
    ("doctor", "report"),
    ("cli",),
)
"""The rooms of the package from bottom to top. A room imports from itself and from those below it."""

MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60

HEIGHT = {room: height for height, layer in enumerate(LAYERS) for room in layer}
FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import; `from a import b` counts as a.b."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def test_every_room_has_a_layer() -> None:
    assert {room_of(path) for path in FILES} - {"__init__"} == set(HEIGHT)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    own = room_of(path)
    for line, name in imports(path):
        parts = name.split(".")
        if parts[0] != "megatron_async" or own == "__init__" or len(parts) < 2 or parts[1].startswith("__"):
            continue
        other = parts[1]
        allowed = other == own or HEIGHT[other] < HEIGHT[own]
        assert allowed, f"{path}:{line}: {own} imports {name}, which is beside or above it"


def test_schedules_need_the_standard_library_alone() -> None:
    heavy = ("torch", "megatron.", "numpy")
    found = [(path.name, name) for path in (PACKAGE / "schedules").rglob("*.py") for _, name in imports(path)]
    assert [entry for entry in found if entry[1].startswith(heavy)] == []


def test_version_dependent_megatron_names_stay_in_mcore() -> None:
    """`megatron.training`, and names that Megatron marks as private."""
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path in FILES
        if room_of(path) != "mcore"
        for line, name in imports(path)
        if name.startswith("megatron.training") or (name.startswith("megatron.") and "._" in name)
    ]
    assert found == []


def names_of_schedules(tree: ast.AST) -> Iterator[int]:
    """Lines that compare something with a schedule's name."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Compare):
            continue
        for operand in (node.left, *node.comparators):
            constants = operand.elts if isinstance(operand, ast.Tuple | ast.List | ast.Set) else [operand]
            if any(isinstance(constant, ast.Constant) and constant.value in SCHEDULES for constant in constants):
                yield node.lineno


def test_no_name_of_a_schedule_is_compared_outside_schedules() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in FILES
        if room_of(path) != "schedules"
        for line in names_of_schedules(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert found == []


def test_the_comparison_would_be_found() -> None:
    assert list(names_of_schedules(ast.parse('a == "2bw"\nb in ("1f1b", "wpipe")\nc == "other"'))) == [1, 2]


def test_files_and_functions_are_small() -> None:
    large = [
        f"{path.relative_to(PACKAGE)}: {lines} lines"
        for path in FILES
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_FILE_LINES
    ]
    long = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.name} has {length} lines"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]
    assert large + long == []
