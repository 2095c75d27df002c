# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Reads documents from JSON lines, plain text, Parquet and `datasets` sources, in a fixed order.

| Format | Recognized by | One document is |
|---|---|---|
| `jsonl` | `.jsonl`, `.json`, `.ndjson`, each also with `.gz` | one line |
| `text` | `.txt`, `.md`, `.py`, each also with `.gz` | the file, or a paragraph or line of it |
| `parquet` | `.parquet` | one row |
| `dataset` | a folder | one row; a folder of `save_to_disk`, or anything `datasets.load_dataset` takes |
"""

import glob
import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, cast, get_args

Format = Literal["jsonl", "text", "parquet", "dataset"]
FORMATS: tuple[Format, ...] = get_args(Format)
TextUnit = Literal["file", "paragraph", "line"]
TEXT_UNITS: tuple[TextUnit, ...] = get_args(TextUnit)
_ENDINGS: dict[Format, tuple[str, ...]] = {
    "jsonl": (".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz", ".ndjson.gz"),
    "text": (".txt", ".md", ".py", ".txt.gz", ".md.gz", ".py.gz"),
    "parquet": (".parquet",),
}
_UTF8_MARK = b"\xef\xbb\xbf"


class Source(NamedTuple):
    """One input: its path (or, for `dataset`, a name on the hub) and its format."""

    path: str
    format: Format


@dataclass(frozen=True, slots=True, kw_only=True)
class PreprocessOptions:
    """What to read and how, and where to write it."""

    inputs: tuple[str, ...]  # files, patterns, folders or data set names, in this order
    input_format: Format | None = None  # of all inputs; None decides by their names
    keys: tuple[str, ...] = ("text",)  # fields of a record that hold text
    text_unit: TextUnit = "file"  # one document of a plain text file; paragraphs are separated by blank lines
    dataset_config: str | None = None  # configuration name for `load_dataset`
    dataset_split: str = "train"  # of a `dataset` source
    output_prefix: str
    append_eod: bool = False  # end every document with the tokenizer's end-of-document token
    workers: int = 1  # processes that tokenize
    log_interval: int = 1000  # documents between two calls of the progress function

    def output(self, key: str) -> str:
        """Data prefix of a key's `.bin` and `.idx`."""
        return f"{self.output_prefix}_{key}_document"


class Record(NamedTuple):
    """One document: its place, for messages, and its text for each key."""

    where: str
    texts: tuple[str, ...]


Problem = str
"""A readable line about bad input. The functions below yield it in place of what they cannot return."""


def resolve_sources(options: PreprocessOptions) -> Iterator[Source | Problem]:
    """Expand patterns and find each input's format, in the order of the inputs, sorted within a pattern."""
    found = [source for name in options.inputs for source in _expand(name, options.input_format)]
    yield from found
    counts = Counter(source.path for source in found if isinstance(source, Source))
    for path, count in sorted(counts.items()):
        if count > 1:
            yield f"{path} is named {count} times: its documents would be written as often."


def check_source(source: Source, options: PreprocessOptions) -> Iterator[Problem]:
    """Check the beginning of a source: can it be opened, does it have the keys?"""
    if source.format == "text" and options.keys != ("text",):
        yield f"{source.path} is plain text, which has the key text only, not {', '.join(options.keys)}."
        return
    yield from takewhile(lambda item: isinstance(item, Problem), read_records(source, options))


def read_records(source: Source, options: PreprocessOptions) -> Iterator[Record | Problem]:
    """All records of a source, in order."""
    read = {"jsonl": _json_lines, "text": _text}.get(source.format, _rows)
    try:
        yield from read(source, options)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        yield f"{source.path} cannot be read: {error}."


def _expand(name: str, chosen: Format | None) -> Iterator[Source | Problem]:
    exists = Path(name).exists()
    if not exists and chosen == "dataset":
        yield Source(name, "dataset")  # a name on the hub
        return
    paths = [name] if exists else sorted(glob.glob(name, recursive=True))
    if not paths:
        yield f"{name} matches no file." if glob.has_magic(name) else f"{name} does not exist."
    for path in paths:
        folder = Path(path).is_dir()
        kind = chosen or ("dataset" if folder else None)
        kind = kind or next((kind for kind, endings in _ENDINGS.items() if path.endswith(endings)), None)
        if kind is None:
            yield f"{path}: the format is not clear from its name; give --input-format ({', '.join(FORMATS)})."
        elif kind != "dataset" and folder:
            yield f"{path} is a folder: for {kind} name its files, for example '{path}/*'."
        else:
            yield Source(path, kind)


def _open(path: str) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.endswith(".gz") else open(path, "rb")


def _json_lines(source: Source, options: PreprocessOptions) -> Iterator[Record | Problem]:
    with _open(source.path) as file:
        for number, line in enumerate(file, start=1):
            content = line.removeprefix(_UTF8_MARK).strip() if number == 1 else line.strip()
            if not content:
                continue
            where = f"{source.path}, line {number}"
            try:
                value = json.loads(content.decode())
            except ValueError as error:  # UnicodeDecodeError and JSONDecodeError
                yield f"{where}: not a JSON object in UTF-8: {error}."
                continue
            if isinstance(value, dict):
                yield from _record(where, value, options.keys)
            else:
                yield f"{where}: one JSON object a line is needed, found {type(value).__name__}."


def _record(where: str, fields: Mapping[str, Any], keys: Sequence[str]) -> Iterator[Record | Problem]:
    wrong = [key for key in keys if not isinstance(fields.get(key), str)]
    for key in wrong:
        if key in fields:
            yield f"{where}: {key} holds {type(fields[key]).__name__}, text is needed."
        else:
            yield f"{where}: no key {key}; there are {', '.join(map(str, fields)) or 'none'}."
    if not wrong:
        yield Record(where, tuple(fields[key] for key in keys))


def _text(source: Source, options: PreprocessOptions) -> Iterator[Record]:
    with io.TextIOWrapper(_open(source.path), encoding="utf-8-sig", newline="\n") as file:  # line ends stay
        lines = enumerate(file, start=1)
        if options.text_unit == "file":
            yield Record(source.path, (file.read(),))
        elif options.text_unit == "line":
            for number, line in lines:
                yield Record(f"{source.path}, line {number}", (line.rstrip("\r\n"),))
        else:  # runs of lines that are not blank
            for filled, run in groupby(lines, key=lambda entry: bool(entry[1].strip())):
                if filled:
                    numbers, texts = zip(*run, strict=True)
                    yield Record(f"{source.path}, line {numbers[0]}", ("".join(texts),))


def _rows(source: Source, options: PreprocessOptions) -> Iterator[Record | Problem]:
    import datasets  # takes seconds, and only these formats need it

    try:
        rows = _load(source, options)
        if isinstance(rows, datasets.DatasetDict):
            rows = rows[options.dataset_split]
        columns = rows.column_names
        missing = [key for key in options.keys if columns is not None and key not in columns]
        if missing:
            yield f"{source.path}: no key {', '.join(missing)}; there are {', '.join(columns)}."
            return
        for number, fields in enumerate(rows.select_columns(list(options.keys)), start=1):
            yield from _record(f"{source.path}, row {number}", fields, options.keys)
    except Exception as error:  # the library raises many kinds, for files, splits, names and the network
        yield f"{source.path} cannot be read by datasets: {type(error).__name__}: {error}."


def _load(source: Source, options: PreprocessOptions) -> Any:
    """Open without copying the data into the library's cache."""
    import datasets

    if source.format == "parquet":
        return datasets.load_dataset("parquet", data_files=[source.path], split="train", streaming=True)
    if any((Path(source.path) / name).exists() for name in ("state.json", "dataset_dict.json")):
        return datasets.load_from_disk(source.path)
    return datasets.load_dataset(source.path, options.dataset_config, split=options.dataset_split, streaming=True)
