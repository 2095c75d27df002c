# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A small corpus built once, and arguments with their defaults."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megatron_async import platform

# Other tests of the session run Megatron, whose modules must be adapted before they are imported.
platform.activate(platform.choose("auto")[0])

from megatron_async.data.preprocessing.indexed import IndexedWriter  # noqa: E402
from megatron_async.data.preprocessing.prepare import CorpusPaths, prepare_corpus  # noqa: E402

MakeArguments = Callable[..., argparse.Namespace]
UNICODE = "naïve Straße 日本語 🙂 \u0000 \ttab  two  spaces \r\n"


def write_sources(root: Path, count: int = 40) -> Path:
    """A folder of Python files with everything that a corpus has to leave out beside what it takes."""
    for number in range(count):
        folder = root / f"package_{number % 4}"
        folder.mkdir(parents=True, exist_ok=True)
        lines = [f"def function_{number}_{line}(value):\n    return value + {line}\n" for line in range(20)]
        (folder / f"module_{number:02}.py").write_text("".join(lines), encoding="utf-8")
    (root / "unicode.py").write_bytes(f"TEXT = '''{UNICODE}'''\n".encode())
    (root / "copy_of_module_00.py").write_bytes((root / "package_0" / "module_00.py").read_bytes())
    (root / "blank.py").write_text("\n \n")
    (root / "latin1.py").write_bytes("# caf\xe9\n".encode("latin-1"))
    (root / "notes.txt").write_text("not Python\n")
    for skipped in ("test", "site-packages", "package_0/__pycache__", "encodings"):
        (root / skipped).mkdir()
        (root / skipped / "module.py").write_text(f"left_out = '{skipped}'\n")
    return root


def write_data(prefix: Path, documents: Sequence[Sequence[int]]) -> str:
    """A data set of these documents, with a vocabulary of 1,000 tokens; its prefix."""
    with IndexedWriter(str(prefix), 1000) as writer:
        for document in documents:
            writer.add(document)
        writer.commit()
    return str(prefix)


@pytest.fixture(scope="session")
def source_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sources(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory, source_root: Path) -> CorpusPaths:
    return prepare_corpus(tmp_path_factory.mktemp("prepared") / "corpus", 300, root=source_root)


@pytest.fixture(scope="session")
def make_arguments() -> MakeArguments:
    from megatron_async.config.options import add_options
    from megatron_async.mcore.arguments import add_megatron_options

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_options(parser)
    add_megatron_options(parser)

    def make(*words: str) -> argparse.Namespace:
        args = parser.parse_args([str(word) for word in words])
        # What Megatron's validation derives, without asking for a model.
        args.data_parallel_size = 1
        args.rank = 0
        return args

    return make
