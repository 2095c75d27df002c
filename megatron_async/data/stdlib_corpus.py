# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A text corpus that needs no download: the source of the running interpreter's own standard library.

One document is one `*.py` file. Every machine with a Python has it, it is a few megabytes of real text with
long range structure, and a small model learns it visibly within minutes on a CPU.

Left out: tests (they repeat the code they test), installed packages, tables that are data rather than text
(`encodings`, `pydoc_data`, the build's `_sysconfigdata`), files that are not UTF-8 or hold nothing but
blanks, and second copies of a text. A file belongs to the held-out part by a hash of its relative path, so
the parts are disjoint and the same on every machine with that Python version.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "encodings",
        "idle_test",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
    }
)
SKIPPED_FILE_PREFIX = "_sysconfigdata"
HELD_OUT_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Document:
    """One source file.

    Attributes:
        path: relative to the corpus' root, with forward slashes.
        text: the whole file.
        digest: SHA-256 of the file's bytes, in hexadecimal.
    """

    path: str
    text: str
    digest: str

    @property
    def size(self) -> int:
        """Length of the text in bytes of UTF-8."""
        return len(self.text.encode())


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training and held-out documents, each in the order of their paths; no text is in both."""

    train: tuple[Document, ...]
    valid: tuple[Document, ...]


def standard_library_root() -> Path:
    """Folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def read_corpus(root: Path | None = None) -> Corpus:
    """Read all documents below `root` (default: the standard library) and part them.

    Raises:
        ValueError: if `root` holds fewer than two usable files, because then one part would be empty.
    """
    root = standard_library_root() if root is None else Path(root)
    documents = _distinct(_read(root, path) for path in _source_files(root))
    if len(documents) < 2:
        raise ValueError(
            f"{root} holds {len(documents)} readable Python files; a training and a held-out part need at "
            "least 2. Give a folder with more *.py files."
        )
    held_out = {document.path for document in documents if is_held_out(document.path)}
    # A small folder may have no path below the threshold: its smallest hash stands in, so that no part is
    # empty.
    if not held_out or len(held_out) == len(documents):
        held_out = {min(documents, key=lambda document: _path_hash(document.path)).path}
    return Corpus(
        train=tuple(document for document in documents if document.path not in held_out),
        valid=tuple(document for document in documents if document.path in held_out),
    )


def is_held_out(path: str) -> bool:
    """Whether the file with this relative path is kept from training."""
    return _path_hash(path) < HELD_OUT_SHARE


def _path_hash(path: str) -> float:
    """Uniform in [0, 1), the same on every machine."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8]) / 2**64


def _source_files(root: Path) -> list[str]:
    """Relative paths of the candidate files, sorted."""
    found: list[str] = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        relative = Path(folder).relative_to(root)
        found += [
            (relative / name).as_posix()
            for name in files
            if name.endswith(".py") and not name.startswith(SKIPPED_FILE_PREFIX)
        ]
    return sorted(found)


def _read(root: Path, path: str) -> Document | None:
    try:
        content = (root / path).read_bytes()
        text = content.decode()
    except (OSError, UnicodeDecodeError):
        return None
    if not text.strip():
        return None
    return Document(path=path, text=text, digest=hashlib.sha256(content).hexdigest())


def _distinct(documents: Iterable[Document | None]) -> list[Document]:
    """Readable documents without second copies: a copy could land in the other part."""
    by_digest: dict[str, Document] = {}
    for document in documents:
        if document is not None:
            by_digest.setdefault(document.digest, document)
    return list(by_digest.values())
