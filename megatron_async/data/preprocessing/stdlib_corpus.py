# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A text corpus without a download: the source of the running interpreter's standard library.

One document is one `*.py` file. Every machine with Python has these few megabytes of text with long-range structure,
and a small model learns it visibly within minutes on a CPU.

Left out: tests (they repeat the code they test), installed packages, tables of data (`encodings`, `pydoc_data`, the
build's `_sysconfigdata`), files that are blank or not UTF-8, and second copies of a text. A hash of the relative path
decides which files are held out, so the parts are disjoint and equal on every machine with that Python version.
"""

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

SKIPPED_FOLDERS = frozenset("__pycache__ dist-packages encodings idle_test pydoc_data site-packages test tests".split())
SKIPPED_FILE_PREFIX = "_sysconfigdata"
HELD_OUT_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Document:
    """One source file.

    Attributes:
        path: relative to the corpus' root, with forward slashes.
        text: the whole file.
        size: length in bytes.
        digest: SHA-256 of the bytes, in hexadecimal.
    """

    path: str
    text: str
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training and held-out documents, in the order of their paths; no text is in both."""

    train: tuple[Document, ...]
    valid: tuple[Document, ...]


def standard_library_root() -> Path:
    """Folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def read_corpus(root: Path | None = None) -> Corpus:
    """Read all documents below `root` (default: the standard library) and divide them.

    Raises:
        ValueError: `root` holds fewer than two usable files, so one part would be empty.
    """
    root = standard_library_root() if root is None else Path(root)
    documents = _documents(root)
    if len(documents) < 2:
        raise ValueError(
            f"{root} holds {len(documents)} readable Python files; a training and a held-out part need at least 2. "
            "Give a folder with more *.py files."
        )
    held_out = {document.path for document in documents if is_held_out(document.path)}
    # In a small folder, the file with the smallest hash is held out if no hash, or every one, is below the threshold.
    if not held_out or len(held_out) == len(documents):
        held_out = {min(documents, key=lambda document: _path_hash(document.path)).path}
    return Corpus(
        train=tuple(document for document in documents if document.path not in held_out),
        valid=tuple(document for document in documents if document.path in held_out),
    )


def is_held_out(path: str) -> bool:
    """Whether the file with this relative path is held out from training."""
    return _path_hash(path) < HELD_OUT_SHARE


def _path_hash(path: str) -> float:
    """Uniform in [0, 1), the same on every machine."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8]) / 2**64


def _documents(root: Path) -> list[Document]:
    """Usable documents in the order of their paths. Of equal texts the first: a copy could land in the other part."""
    by_digest: dict[str, Document] = {}
    for path in _source_files(root):
        try:
            content = (root / path).read_bytes()
            text = content.decode()
        except (OSError, UnicodeDecodeError):
            continue
        if text.strip():
            digest = hashlib.sha256(content).hexdigest()
            by_digest.setdefault(digest, Document(path, text, len(content), digest))
    return list(by_digest.values())


def _source_files(root: Path) -> list[str]:
    """Relative paths of the candidate files, sorted."""
    found: list[str] = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        sources = (name for name in files if name.endswith(".py") and not name.startswith(SKIPPED_FILE_PREFIX))
        found += [(Path(folder).relative_to(root) / name).as_posix() for name in sources]
    return sorted(found)
