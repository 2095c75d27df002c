# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The data sets that `--data-path` and its relatives name, and checks of their files.

Megatron-LM's forms: one prefix; several prefixes (shares follow their sizes); or weights and prefixes in turn. Weights
are shares of the samples to draw, whatever the sizes of the sets. They need not sum to 1.
"""

import argparse
import json
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

from megatron_async.mcore.training import IndexReader

SPLIT_NAMES = ("train", "valid", "test")
# Megatron's default where --data-path comes without --split.
DEFAULT_SPLIT = "969, 30, 1"
_OBJECT_STORAGE = ("s3://", "msc://")


class Blend(NamedTuple):
    """Data prefixes with their positive weights; without weights, shares follow the sizes of the sets."""

    prefixes: list[str]
    weights: list[float] | None = None


@dataclass(frozen=True, slots=True)
class DataSources:
    """The data of a run. At most one of the first two is given; neither for mock data.

    Attributes:
        blend: one blend for all parts, divided by `--split`.
        per_split: a blend, or None, for each of training, validation and test.
        problems: errors in the arguments, one line each.
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
    option, words = "--data-path", args.data_path
    if args.data_args_path is not None:
        option = "--data-args-path"
        try:
            words = Path(args.data_args_path).read_text().split()
        except (OSError, UnicodeDecodeError) as error:
            problems.append(f"{option} {args.data_args_path} cannot be read: {error}.")
            words = None
    blend = None if words is None else _parse(words, option, problems)
    parts = {name: _parse(words, option, problems) for name, (option, words) in _words_of_parts(args, problems).items()}
    return DataSources(blend, tuple(map(parts.get, SPLIT_NAMES)) if parts else None, tuple(problems))


def missing_data_files(args: argparse.Namespace) -> list[str]:
    """All problems that would keep the data sets from being built; needs no process group.

    Contradicting or absent sources, missing files and files that are no Megatron index, weights that are not positive,
    and a `--split` that leaves a part of a set without documents.
    """
    sources = data_sources(args)
    problems = [*_exclusive(args), *sources.problems]
    documents: dict[str, int] = {}
    for prefix in dict.fromkeys(sources.prefixes()):
        problems += _file_problems(prefix, documents)
    validation = sources.blend
    if sources.per_split is not None:
        validation = sources.per_split[SPLIT_NAMES.index("valid")]
        empty = (prefix for prefix, number in documents.items() if not number)
        problems += [f"{prefix}.idx lists no documents: nothing can be drawn from it." for prefix in empty]
        if sources.per_split[0] is None and not args.skip_train:
            problems.append(
                "training needs data: give --train-data-path beside --valid-data-path and --test-data-path."
            )
    elif sources.blend is not None:
        problems += _split_problems(args.split or DEFAULT_SPLIT, documents)
    if args.full_validation and validation is not None and validation.weights:
        problems.append(
            "--full-validation reads each validation set once, so weights have no meaning there: give validation data "
            "as prefixes without weights."
        )
    return problems


def is_local(prefix: str) -> bool:
    """Whether a data prefix names files, not object storage."""
    return not prefix.startswith(_OBJECT_STORAGE)


def _exclusive(args: argparse.Namespace) -> Iterator[str]:
    sources = {
        "--mock-data": args.mock_data,
        "--data-path": args.data_path is not None,
        "--data-args-path": args.data_args_path is not None,
        "--train/valid/test-data-path": any(getattr(args, f"{name}_data_path") is not None for name in SPLIT_NAMES),
        "--per-split-data-args-path": args.per_split_data_args_path is not None,
    }
    given = [option for option, chosen in sources.items() if chosen]
    if not given:
        yield (
            "no training data: give --data-path, or --train-data-path (and --valid-data-path), or --mock-data for "
            "artificial tokens."
        )
    if len(given) > 1:
        yield f"{' and '.join(given)} exclude each other: give one source of data."


def _words_of_parts(args: argparse.Namespace, problems: list[str]) -> dict[str, tuple[str, list[str]]]:
    """For each part that has data: the option to name in messages, and its words."""
    path = args.per_split_data_args_path
    if path is None:
        given = {name: getattr(args, f"{name}_data_path") for name in SPLIT_NAMES}
        return {name: (f"--{name}-data-path", words) for name, words in given.items() if words is not None}
    option = f"--per-split-data-args-path {path}"
    try:
        table = json.loads(Path(path).read_text())
        missing = [name for name in SPLIT_NAMES if name not in table]
        words_of = {name: _words(table[name]) for name in SPLIT_NAMES if table.get(name) not in (None, "")}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        problems.append(f"{option} cannot be read as a JSON object of lists: {error}.")
        return {}
    if missing:
        problems.append(f"{option} has no {', '.join(missing)}: it needs the keys train, valid and test.")
    return {name: (f"{option} ({name})", words) for name, words in words_of.items()}


def _words(value: str | list[str | float]) -> list[str]:
    return value.split() if isinstance(value, str) else [str(word) for word in value]


def _parse(words: Sequence[str], option: str, problems: list[str]) -> Blend | None:
    """Read one blend; errors go to `problems`."""
    words = [word.strip() for word in words]
    if not words:
        problems.append(f"{option} is empty: give a data prefix, or weights and prefixes in turn.")
        return None
    if len(words) % 2 == 0 and all(_number(word) is not None for word in words[::2]):
        weights = [float(word) for word in words[::2]]
        problems += [
            f"{option}: weight {word} of {prefix} is not a positive number. Weights are shares of the samples to draw; "
            "leave out a set that should not be drawn."
            for word, weight, prefix in zip(words[::2], weights, words[1::2], strict=True)
            if not (math.isfinite(weight) and weight > 0)
        ]
        return Blend(words[1::2], weights)
    # A file may be named like a number; any other number here is a weight out of place.
    stray = [word for word in words if _number(word) is not None and not Path(f"{word}.idx").exists()]
    if stray:
        problems.append(
            f"{option} {' '.join(words)}: weights and prefixes must take turns, a weight before each prefix, or no "
            f"weights at all; {', '.join(stray)} cannot be assigned."
        )
    return Blend([word for word in words if word not in stray])


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _file_problems(prefix: str, documents: dict[str, int]) -> Iterator[str]:
    """Check the two files of a prefix; the number of its documents goes to `documents`."""
    if not is_local(prefix):
        return
    missing = [path for path in (f"{prefix}.bin", f"{prefix}.idx") if not Path(path).is_file()]
    if missing:
        hint = ""
        if prefix.endswith((".bin", ".idx")):
            hint = f" Leave the ending out: {prefix[:-4]}."
        elif Path(f"{prefix}_text_document.idx").exists():
            hint = f" Did you mean {prefix}_text_document?"
        verb = "does" if len(missing) == 1 else "do"
        yield f"data prefix {prefix}: {' and '.join(missing)} {verb} not exist.{hint}"
        return
    try:
        index = IndexReader(f"{prefix}.idx", multimodal=False)
    except (AssertionError, OSError, ValueError, struct.error):
        yield f"{prefix}.idx is not a Megatron index. Write it with megatron-async preprocess."
        return
    documents[prefix] = len(index)
    last = (int(index.sequence_pointers[-1]), int(index.sequence_lengths[-1])) if len(index) else (0, 0)
    expected, size = last[0] + last[1] * index.dtype_size, Path(f"{prefix}.bin").stat().st_size
    if expected != size:
        yield (
            f"data prefix {prefix}: the index describes {expected} bytes of tokens, but {prefix}.bin has {size}. The "
            "two files do not belong together or were not copied to the end; copy or preprocess them again."
        )


def _split_problems(split: str, documents: dict[str, int]) -> Iterator[str]:
    """Parts with a share but without a document: Megatron would search for one for ever."""
    shares = _shares(split)
    if shares is None:
        yield (
            f"--split {split}: give up to three numbers, none negative, for training, validation and test, the first "
            "above 0, for example 95,5,0."
        )
        return
    bounds = list(pairwise(accumulate(shares, initial=0.0)))
    for prefix, number in documents.items():
        empty = [
            name
            for name, (low, high) in zip(SPLIT_NAMES, bounds, strict=True)
            if high > low and round(high * number) <= round(low * number)
        ]
        if empty:
            yield (
                f"--split {split} asks for {', '.join(empty)} data, but {prefix} has {number} documents, too few for "
                "such a share. Raise that share or set it to 0, for example --split 95,5,0, or give separate sets with "
                "--train-data-path and --valid-data-path."
            )


def _shares(split: str) -> list[float] | None:
    """The three shares, summing to 1; None if `split` is not valid."""
    numbers = [_number(word) for word in split.split(",")]
    values = [number for number in numbers if number is not None and math.isfinite(number) and number >= 0]
    if len(values) != len(numbers) or not 1 <= len(values) <= len(SPLIT_NAMES) or values[0] == 0:
        return None
    return [value / sum(values) for value in [*values, 0.0, 0.0][: len(SPLIT_NAMES)]]
