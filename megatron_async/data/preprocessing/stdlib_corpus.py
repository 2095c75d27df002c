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
from pathlib import Path

SKIPPED_FOLDERS = frozenset("__pycache__ dist-packages encodings idle_test pydoc_data site-packages test tests".split())
SKIPPED_FILE_PREFIX = "_sysconfigdata"
HELD_OUT_SHARE = 0.05

Texts = dict[str, str]
"""Path below the root, with forward slashes -> text of the whole file, in the order of paths."""


def standard_library_root() -> Path:
    """Folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def read_corpus(root: Path | None = None) -> tuple[Texts, Texts]:
    """Training and held-out texts below `root` (default: the standard library); no text is in both.

    Raises:
        ValueError: `root` holds fewer than two usable files, so one part would be empty.
    """
    root = standard_library_root() if root is None else Path(root)
    texts = _texts(root)
    if len(texts) < 2:
        raise ValueError(
            f"{root} holds {len(texts)} readable Python files; a training and a held-out part need at least 2. "
            "Give a folder with more *.py files."
        )
    held_out = set(filter(is_held_out, texts))
    # In a small folder, the file with the smallest hash is held out if no hash, or every one, is below the threshold.
    if not held_out or len(held_out) == len(texts):
        held_out = {min(texts, key=_path_hash)}
    train = {path: text for path, text in texts.items() if path not in held_out}
    return train, {path: text for path, text in texts.items() if path in held_out}


def is_held_out(path: str) -> bool:
    """Whether the file with this relative path is held out from training."""
    return _path_hash(path) < HELD_OUT_SHARE


def _path_hash(path: str) -> float:
    """Uniform in [0, 1), the same on every machine."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8]) / 2**64


def _texts(root: Path) -> Texts:
    """Usable texts. Of equal ones the first: a copy could land in the other part."""
    first: dict[str, str] = {}
    for path in _source_files(root):
        try:
            text = (root / path).read_bytes().decode()
        except (OSError, UnicodeDecodeError):
            continue
        if text.strip():
            first.setdefault(text, path)
    return {path: text for text, path in first.items()}


def _source_files(root: Path) -> list[str]:
    """Relative paths of the candidate files, sorted."""
    found: list[str] = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        sources = (name for name in files if name.endswith(".py") and not name.startswith(SKIPPED_FILE_PREFIX))
        found += [(Path(folder).relative_to(root) / name).as_posix() for name in sources]
    return sorted(found)
