# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The pages in docs/: every path, link and module that they name exists."""

import importlib.util
import re
from pathlib import Path

import pytest

from tests.unit.test_architecture import LAYERS

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "megatron_async"
DOCUMENTS = sorted((ROOT / "docs").glob("*.md"))
# Paths that are no files of the repository: placeholders, output of runs, files of Megatron-LM.
FOREIGN = re.compile(r"[A-Z_]+/|runs/|/|megatron/|core/|training/arguments\.py$|pretrain_gpt\.py$")


def words_in(text: str) -> set[str]:
    """Words of code spans and of indented code blocks."""
    code = re.findall(r"`([^`\n]+)`", text) + [line for line in text.splitlines() if line.startswith("    ")]
    return {word.rstrip(",.;:)").lstrip("(") for part in code for word in part.split()}


def paths_in(text: str) -> set[str]:
    """Words that look like a path: a folder in it, or the ending of a file that a person writes."""
    plain = {word for word in words_in(text) if re.fullmatch(r"\.?[\w*-]+([./][\w*-]+)*/?", word)}
    paths = {word for word in plain if "/" in word or re.search(r"\.(py|sh|md|toml|sbatch)$", word)}
    return {path for path in paths if not FOREIGN.match(path)}


def exists(path: str, document: Path) -> bool:
    """Whether `path` is there, from the repository, the package, the tests or the page; bare names may lie deeper."""
    bases = (ROOT, PACKAGE, ROOT / "tests", document.parent)
    pattern = path.rstrip("/")
    deeper = () if "/" in pattern else (PACKAGE, ROOT / "examples")
    return any(any(base.glob(pattern)) for base in bases) or any(any(base.rglob(pattern)) for base in deeper)


def test_the_pages_are_found():
    assert {"architecture.md", "schedules.md", "optimizers.md"} <= {document.name for document in DOCUMENTS}
    found = paths_in("see `pipeline/gone.py`, `DIR/x.py`, `tools/x.py --load runs/a`\n\n    python examples/y.py\n")
    assert found == {"pipeline/gone.py", "tools/x.py", "examples/y.py"}
    assert not exists("pipeline/gone.py", DOCUMENTS[0]) and exists("pretrain.py", DOCUMENTS[0])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.stem)
def test_paths_and_links_exist(document):
    text = document.read_text(encoding="utf-8")
    assert [path for path in sorted(paths_in(text)) if not exists(path, document)] == []
    links = {target for target in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in target}
    assert [link for link in sorted(links) if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.stem)
def test_modules_exist(document):
    text = document.read_text(encoding="utf-8")
    modules = re.findall(r"-m ((?:megatron_async|tests|benchmarks)[\w.]*)", text)
    assert [module for module in modules if importlib.util.find_spec(module) is None] == []


def test_the_architecture_page_lists_the_rooms_in_the_order_of_their_layers():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rooms = re.findall(r"^\| `(\w+)` \|", page.split("## Rooms")[1].split("\n## ")[0], re.MULTILINE)
    assert rooms == [room for layer in LAYERS for room in layer]


def test_the_walks_of_the_architecture_page_cross_every_room():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = {path.split("/")[0].removesuffix(".py") for path in paths_in(page) if path.endswith(".py")}
    assert {room for layer in LAYERS for room in layer} - named - {"files"} == set()
