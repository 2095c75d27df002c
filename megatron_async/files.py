# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Atomic writes, and files of JSON lines. The lowest layer: standard library alone."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path, *, sync: bool = False) -> Iterator[Path]:
    """Yield a temporary path beside `path` with the same suffix; after the block, rename that file to `path`.

    Readers see the old file or the new one; with `sync` this also holds after a power failure. Creates the folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield temporary
        if sync:
            sync_to_disk(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if sync:
        sync_to_disk(path.parent)


def write_atomically(path: Path, content: str | bytes, *, sync: bool = False) -> None:
    """Write a whole file atomically, text as UTF-8; see `replacing`."""
    with replacing(path, sync=sync) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def sync_to_disk(path: Path) -> None:
    """Force a file's content, or a folder's list of entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def obstacle(path: Path) -> str | None:
    """Why a file cannot be written to `path`, as far as folders and rights show; None if it can."""
    if path.is_dir():
        return "it is a folder"
    folder = next(folder for folder in path.absolute().parents if folder.exists())
    if not folder.is_dir():
        return f"{folder} is a file"
    return None if os.access(folder, os.W_OK | os.X_OK) else f"{folder} cannot be written to"


class JsonLines:
    """A new file of JSON objects, one a line, flushed line by line; `rows` come first. NaN and infinity become null."""

    def __init__(self, path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
        write_atomically(path, "".join(map(json_line, rows)))
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        self._file.write(json_line(row))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file. A last line without its newline was cut off and is left out.

    Raises:
        ValueError: another line is not a JSON object; names the file and the line.
    """
    return [row for _, row in parse_json_lines(path.read_text(encoding="utf-8"), str(path))]


def parse_json_lines(text: str, source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Like `read_json_lines`, from text; each object with "SOURCE, line N" for messages about it."""
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        if not line.strip():
            continue
        place = f"{source}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{place}: not JSON ({error}): {line[:80]!r}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{place}: expected a JSON object, got {line[:80]!r}")
        yield place, row


def json_line(row: Mapping[str, Any]) -> str:
    """A row of a JSON-lines file; NaN and infinity become null."""
    return json.dumps(_finite(row)) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
