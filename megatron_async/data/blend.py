# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""What `--data-path` and its relatives ask for, and whether it is there. No torch, no Megatron.

Megatron-LM's forms: a prefix; several prefixes (shares follow their sizes); or weight and prefix in turn.
Weights are shares of the samples that are drawn, whatever the sizes of the sets, and need not sum to 1.
"""

import argparse
import json
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SPLIT_NAMES = ("train", "valid", "test")
# What Megatron takes when --data-path comes without --split.
DEFAULT_SPLIT = "969, 30, 1"
_OBJECT_STORAGE = ("s3://", "msc://")
# Index header: magic, version (uint64), token type (uint8), number of sequences (uint64).
_INDEX_HEADER = struct.Struct("<9sQBQ")
_INDEX_MAGIC = b"MMIDIDX\x00\x00"


@dataclass(frozen=True, slots=True)
class Blend:
    """Data prefixes, with a positive weight each, or None where shares follow the sizes of the sets."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None

    def for_megatron(self) -> tuple[list[str], list[float] | None]:
        """The same as Megatron's data set configuration wants it."""
        return list(self.prefixes), None if self.weights is None else list(self.weights)


@dataclass(frozen=True, slots=True)
class DataSources:
    """The data of a run; at most one of the first two is given, and neither for mock data.

    Attributes:
        blend: one blend for all parts, divided by `--split`.
        per_split: a blend, or None, for each of training, validation and test.
        problems: what is wrong with the arguments, one readable line each.
    """

    blend: Blend | None
    per_split: tuple[Blend | None, ...] | None
    problems: tuple[str, ...]

    def prefixes(self) -> Iterator[str]:
        """All prefixes in the order given."""
        for blend in (self.blend, *(self.per_split or ())):
            yield from blend.prefixes if blend is not None else ()


def data_sources(args: argparse.Namespace) -> DataSources:
    """Read the data arguments, and the files that `--data-args-path` and its per-split form name."""
    problems: list[str] = []
    option, words = _shared_words(args, problems)
    blend = None if words is None else _parse(words, option, problems)
    split_words = _per_split_words(args, problems)
    per_split: tuple[Blend | None, ...] | None = None
    if split_words:
        per_split = tuple(
            _parse(split_words[name][1], split_words[name][0], problems) if name in split_words else None
            for name in SPLIT_NAMES
        )
    return DataSources(blend, per_split, tuple(problems))


def missing_data_files(args: argparse.Namespace) -> list[str]:
    """Everything that would keep the data sets of these arguments from being built; empty if nothing does.

    Needs no process group and no Megatron. Each line names what was given, the rule and what to change:
    sources that contradict each other or are absent, files that do not exist or are no Megatron index,
    weights that are not positive, a `--split` that leaves a set without documents for a part.
    """
    sources = data_sources(args)
    problems = [*_exclusive(args), *sources.problems]
    counts: dict[str, int] = {}
    for prefix in dict.fromkeys(sources.prefixes()):
        problems += _file_problems(prefix, counts)
    if sources.blend is not None:
        problems += _split_problems(args.split or DEFAULT_SPLIT, counts)
    if args.full_validation and any(blend.weights for blend in _validation(sources)):
        problems.append(
            "--full-validation reads each validation set once, so weights have no meaning there: give "
            "validation data as prefixes without weights."
        )
    if sources.per_split is not None:
        problems += [
            f"{prefix}.idx lists no documents: nothing can be drawn from it." for prefix, n in counts.items() if not n
        ]
        if sources.per_split[0] is None and not args.skip_train:
            problems.append(
                "training needs data: give --train-data-path beside --valid-data-path and --test-data-path."
            )
    return problems


def _validation(sources: DataSources) -> list[Blend]:
    blend = sources.blend if sources.per_split is None else sources.per_split[SPLIT_NAMES.index("valid")]
    return [] if blend is None else [blend]


def _exclusive(args: argparse.Namespace) -> list[str]:
    given = [
        name
        for name, value in {
            "--mock-data": args.mock_data,
            "--data-path": args.data_path is not None,
            "--data-args-path": args.data_args_path is not None,
            "--train/valid/test-data-path": any(getattr(args, f"{name}_data_path") is not None for name in SPLIT_NAMES),
            "--per-split-data-args-path": args.per_split_data_args_path is not None,
        }.items()
        if value
    ]
    problems = [
        f"{option} is not supported: training data are indexed data sets (.bin, .idx). Leave {option} out."
        for option, chosen in {"--sft": args.sft, "--fim-data": args.fim_data}.items()
        if chosen
    ]
    if not given:
        problems.append(
            "no training data: give --data-path, or --train-data-path (and --valid-data-path), or "
            "--mock-data for artificial tokens."
        )
    if len(given) > 1:
        problems.append(f"{' and '.join(given)} exclude each other: give one source of data.")
    return problems


def _shared_words(args: argparse.Namespace, problems: list[str]) -> tuple[str, list[str] | None]:
    if args.data_args_path is None:
        return "--data-path", args.data_path
    try:
        return "--data-args-path", Path(args.data_args_path).read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"--data-args-path {args.data_args_path} cannot be read: {error}.")
        return "--data-args-path", None


def _per_split_words(args: argparse.Namespace, problems: list[str]) -> dict[str, tuple[str, list[str]]]:
    """For each part that has data: the option to name in messages, and its words."""
    if args.per_split_data_args_path is None:
        given = {name: getattr(args, f"{name}_data_path") for name in SPLIT_NAMES}
        return {name: (f"--{name}-data-path", words) for name, words in given.items() if words is not None}
    option = f"--per-split-data-args-path {args.per_split_data_args_path}"
    try:
        table = json.loads(Path(args.per_split_data_args_path).read_text())
        missing = [name for name in SPLIT_NAMES if name not in table]
        words = {name: _words(table[name]) for name in SPLIT_NAMES if name in table}
    except (OSError, ValueError, TypeError) as error:
        problems.append(f"{option} cannot be read as a JSON object of lists: {error}.")
        return {}
    if missing:
        problems.append(f"{option} has no {', '.join(missing)}: it needs the keys train, valid and test.")
    return {name: (f"{option} ({name})", value) for name, value in words.items() if value is not None}


def _words(value: str | list[str | float] | None) -> list[str] | None:
    if value is None or isinstance(value, str):
        return value.split() if value else None
    return [str(word) for word in value]


def _parse(words: Sequence[str], option: str, problems: list[str]) -> Blend | None:
    """Read one blend; what does not fit goes to `problems`."""
    words = [word.strip() for word in words]
    if not words:
        problems.append(f"{option} is empty: give a data prefix, or weights and prefixes in turn.")
        return None
    if len(words) % 2 == 0 and all(_number(word) is not None for word in words[::2]):
        weights = tuple(float(word) for word in words[::2])
        problems += [
            f"{option}: weight {word} of {prefix} is not a positive number. Weights are shares of the "
            "samples to draw; leave out a set that should not be drawn."
            for word, weight, prefix in zip(words[::2], weights, words[1::2], strict=True)
            if not (math.isfinite(weight) and weight > 0)
        ]
        return Blend(tuple(words[1::2]), weights)
    # A file may be named like a number; any other number here is a weight out of place.
    stray = [word for word in words if _number(word) is not None and not Path(f"{word}.idx").exists()]
    if stray:
        problems.append(
            f"{option} {' '.join(words)}: weights and prefixes must take turns, a weight before each prefix, "
            f"or no weights at all; {', '.join(stray)} cannot be assigned."
        )
    return Blend(tuple(word for word in words if word not in stray))


def is_local(prefix: str) -> bool:
    """Whether a data prefix names files, rather than object storage."""
    return not prefix.startswith(_OBJECT_STORAGE)


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _file_problems(prefix: str, counts: dict[str, int]) -> list[str]:
    """Check the two files of a prefix; the number of its documents goes to `counts`."""
    if not is_local(prefix):
        return []
    missing = [path for path in (f"{prefix}.bin", f"{prefix}.idx") if not Path(path).is_file()]
    if missing:
        hint = ""
        if prefix.endswith((".bin", ".idx")):
            hint = f" Leave the ending out: {prefix[:-4]}."
        elif Path(f"{prefix}_text_document.idx").exists():
            hint = f" Did you mean {prefix}_text_document?"
        return [
            f"data prefix {prefix}: {' and '.join(missing)} {'does' if len(missing) == 1 else 'do'} not exist.{hint}"
        ]
    try:
        with open(f"{prefix}.idx", "rb") as file:
            magic, _, _, sequences = _INDEX_HEADER.unpack(file.read(_INDEX_HEADER.size))
    except (OSError, struct.error):
        magic, sequences = b"", 0
    if magic != _INDEX_MAGIC:
        return [f"{prefix}.idx is not a Megatron index. Write it with tools/preprocess_data.py."]
    counts[prefix] = sequences
    return []


def _split_problems(split: str, counts: dict[str, int]) -> list[str]:
    """Parts that a set must serve without having a document for them: Megatron would search for ever."""
    shares = _shares(split)
    if shares is None:
        return [
            f"--split {split}: give up to three numbers, none negative, for training, validation and test, "
            "the first above 0, for example 95,5,0."
        ]
    bounds = [0.0]
    for share in shares:
        bounds.append(bounds[-1] + share)
    problems = []
    for prefix, documents in counts.items():
        empty = [
            name
            for name, low, high in zip(SPLIT_NAMES, bounds, bounds[1:], strict=False)
            if high > low and round(high * documents) <= round(low * documents)
        ]
        if empty:
            problems.append(
                f"--split {split} asks for {', '.join(empty)} data, but {prefix} has {documents} documents, "
                "too few for such a share. Raise that share or set it to 0, for example --split 95,5,0, or "
                "give separate sets with --train-data-path and --valid-data-path."
            )
    return problems


def _shares(split: str) -> list[float] | None:
    """The three shares, summing to 1; None if `split` is not valid."""
    numbers = [_number(word) for word in split.split(",")]
    values = [number for number in numbers if number is not None and math.isfinite(number) and number >= 0]
    if len(values) != len(numbers) or not 1 <= len(values) <= len(SPLIT_NAMES) or values[0] == 0:
        return None
    return [value / sum(values) for value in [*values, 0.0, 0.0][: len(SPLIT_NAMES)]]
