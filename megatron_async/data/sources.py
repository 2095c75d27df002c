# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Reading documents from JSON lines, plain text, Parquet and `datasets` sources, in a fixed order.

| Format | Recognized by | One document is |
|---|---|---|
| `jsonl` | `.jsonl`, `.json`, `.ndjson`, each also with `.gz` | one line |
| `text` | `.txt`, `.md`, `.py`, each also with `.gz` | the file, or a paragraph or line of it |
| `parquet` | `.parquet` | one row |
| `dataset` | a folder | one row; a folder of `save_to_disk`, or anything `datasets.load_dataset` takes |
"""

import glob
import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

Format = Literal["jsonl", "text", "parquet", "dataset"]
FORMATS: tuple[Format, ...] = ("jsonl", "text", "parquet", "dataset")
TextUnit = Literal["file", "paragraph", "line"]
TEXT_UNITS: tuple[TextUnit, ...] = ("file", "paragraph", "line")
_ENDINGS: dict[Format, tuple[str, ...]] = {
    "jsonl": (".jsonl", ".json", ".ndjson"),
    "text": (".txt", ".md", ".py"),
    "parquet": (".parquet",),
}
_UTF8_MARK = b"\xef\xbb\xbf"


@dataclass(slots=True)
class Problems:
    """Readable lines about bad input, collected to be reported together; `limit` keeps the report short."""

    limit: int = 20
    lines: list[str] = field(default_factory=list)

    def add(self, line: str) -> None:
        """Note one problem."""
        if not self.full:
            self.lines.append(line)

    @property
    def full(self) -> bool:
        """Whether there is no point in looking for more."""
        return len(self.lines) >= self.limit


@dataclass(frozen=True, slots=True)
class Source:
    """One input: a path (or a name on the hub, for `dataset`) and how to read it."""

    path: str
    format: Format


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How sources are read.

    Attributes:
        keys: fields of a record that hold text.
        text_unit: what is one document of a plain text file; paragraphs are parted by blank lines.
        dataset_config: configuration name for `load_dataset`, or None.
        dataset_split: which split of a `dataset` source to read.
    """

    keys: tuple[str, ...] = ("text",)
    text_unit: TextUnit = "file"
    dataset_config: str | None = None
    dataset_split: str = "train"


@dataclass(frozen=True, slots=True)
class Record:
    """One document: where it stands, for messages, and its text for each key."""

    where: str
    texts: tuple[str, ...]


def resolve_sources(inputs: Iterable[str], chosen: Format | None, problems: Problems) -> list[Source]:
    """Expand patterns and find each input's format, in the order of `inputs`, sorted within a pattern."""
    sources: list[Source] = []
    for name in inputs:
        sources += [Source(path, kind) for path, kind in _expand(name, chosen, problems)]
    paths = [source.path for source in sources]
    for path in sorted({path for path in paths if paths.count(path) > 1}):
        problems.add(f"{path} is named {paths.count(path)} times: its documents would be written as often.")
    return sources


def check_source(source: Source, options: ReadOptions, problems: Problems) -> None:
    """Look at the beginning of a source: can it be opened, does it have the keys?"""
    if source.format == "text" and options.keys != ("text",):
        problems.add(f"{source.path} is plain text, which has the key text only, not {', '.join(options.keys)}.")
        return
    # One record tells enough; whatever is wrong further on is found while reading.
    next(read_records(source, options, problems), None)


def read_records(source: Source, options: ReadOptions, problems: Problems) -> Iterator[Record]:
    """All good records of a source, in order; the bad ones become lines in `problems`."""
    readers: dict[Format, Callable[[Source, ReadOptions, Problems], Iterator[Record]]] = {
        "jsonl": _json_lines,
        "text": _text,
        "parquet": _rows,
        "dataset": _rows,
    }
    try:
        yield from readers[source.format](source, options, problems)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        problems.add(f"{source.path} cannot be read: {error}.")


def _expand(name: str, chosen: Format | None, problems: Problems) -> Iterator[tuple[str, Format]]:
    exists = Path(name).exists()
    if not exists and chosen == "dataset":
        yield name, "dataset"  # a name on the hub
        return
    paths = [name] if exists else sorted(glob.glob(name, recursive=True))
    if not paths:
        problems.add(f"{name} matches no file." if glob.has_magic(name) else f"{name} does not exist.")
    for path in paths:
        kind = chosen or _recognize(path)
        if kind is None:
            problems.add(f"{path}: the format is not clear from its name; give --input-format ({', '.join(FORMATS)}).")
        elif kind != "dataset" and Path(path).is_dir():
            problems.add(f"{path} is a folder: for {kind} name its files, for example '{path}/*'.")
        else:
            yield path, kind


def _recognize(path: str) -> Format | None:
    if Path(path).is_dir():
        return "dataset"
    plain = path.removesuffix(".gz")
    for kind, endings in _ENDINGS.items():
        if plain.endswith(endings) and (plain == path or kind != "parquet"):
            return kind
    return None


def _open(path: str) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.endswith(".gz") else open(path, "rb")


def _json_lines(source: Source, options: ReadOptions, problems: Problems) -> Iterator[Record]:
    with _open(source.path) as file:
        for number, line in enumerate(file, start=1):
            if problems.full:
                return
            content = line.removeprefix(_UTF8_MARK).strip() if number == 1 else line.strip()
            if not content:
                continue
            where = f"{source.path}, line {number}"
            try:
                value = json.loads(content.decode())
            except ValueError as error:  # UnicodeDecodeError and JSONDecodeError
                problems.add(f"{where}: not a JSON object in UTF-8: {error}.")
                continue
            if isinstance(value, dict):
                yield from _record(where, value, options.keys, problems)
            else:
                problems.add(f"{where}: one JSON object a line is needed, found {type(value).__name__}.")


def _record(where: str, fields: Mapping[str, Any], keys: Sequence[str], problems: Problems) -> Iterator[Record]:
    bad = False
    for key in keys:
        if key not in fields:
            problems.add(f"{where}: no key {key}; there are {', '.join(map(str, fields)) or 'none'}.")
            bad = True
        elif not isinstance(fields[key], str):
            problems.add(f"{where}: {key} holds {type(fields[key]).__name__}, text is needed.")
            bad = True
    if not bad:
        yield Record(where, tuple(fields[key] for key in keys))


def _text(source: Source, options: ReadOptions, problems: Problems) -> Iterator[Record]:
    with _open(source.path) as file:
        if options.text_unit == "file":
            yield Record(source.path, (file.read().removeprefix(_UTF8_MARK).decode(),))
            return
        lines = (line.removeprefix(_UTF8_MARK).decode() for line in file)
        if options.text_unit == "line":
            for number, line in enumerate(lines, start=1):
                yield Record(f"{source.path}, line {number}", (line.rstrip("\r\n"),))
        else:
            yield from _paragraphs(source.path, lines)


def _paragraphs(path: str, lines: Iterable[str]) -> Iterator[Record]:
    block: list[str] = []
    start = 1
    for number, line in enumerate(lines, start=1):
        if line.strip():
            start = start if block else number
            block.append(line)
        elif block:
            yield Record(f"{path}, line {start}", ("".join(block),))
            block = []
    if block:
        yield Record(f"{path}, line {start}", ("".join(block),))


def _rows(source: Source, options: ReadOptions, problems: Problems) -> Iterator[Record]:
    # Only these sources need the library, and importing it takes seconds.
    import datasets

    try:
        rows = _load(source, options)
        if isinstance(rows, datasets.DatasetDict):
            rows = rows[options.dataset_split]
        columns = rows.column_names
        missing = [key for key in options.keys if columns is not None and key not in columns]
        if missing:
            problems.add(f"{source.path}: no key {', '.join(missing)}; there are {', '.join(columns)}.")
            return
        for number, fields in enumerate(rows.select_columns(list(options.keys)), start=1):
            if problems.full:
                return
            yield from _record(f"{source.path}, row {number}", fields, options.keys, problems)
    except Exception as error:  # the library raises many kinds, for files, splits, names and the network
        problems.add(f"{source.path} cannot be read by datasets: {type(error).__name__}: {error}.")


def _load(source: Source, options: ReadOptions) -> Any:
    """Open without copying the data into the library's own cache."""
    import datasets

    if source.format == "parquet":
        return datasets.load_dataset("parquet", data_files=[source.path], split="train", streaming=True)
    folder = Path(source.path)
    if any((folder / name).exists() for name in ("state.json", "dataset_dict.json")):
        return datasets.load_from_disk(source.path)
    return datasets.load_dataset(source.path, options.dataset_config, split=options.dataset_split, streaming=True)
