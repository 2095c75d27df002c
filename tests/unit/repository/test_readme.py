# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The README: its paths and make targets exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def tree_paths() -> list[str]:
    """Paths of the README's tree: indented lines of a path and a description, nested by indentation."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.split("## What is here", 1)[1].split("\n## ", 1)[0]
    paths: list[str] = []
    parents: dict[int, str] = {}
    for line in section.splitlines():
        if not line.startswith("    "):
            continue
        indent, name = len(line) - len(line.lstrip()), line.split()[0]
        parent = parents.get(indent - 4, "")
        paths.append(parent + name)
        parents[indent] = paths[-1]
    return paths


def test_paths_in_the_readme_exist() -> None:
    paths = tree_paths()
    assert len(paths) > 10
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    paths += [target for target in re.findall(r"\]\(([^)#]+)", text) if "://" not in target]
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_make_targets_in_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)\b", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert {"quickstart", "test"} <= named <= targets
