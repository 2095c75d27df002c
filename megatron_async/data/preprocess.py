# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Tokenize documents into Megatron's indexed data sets, with as many processes as asked for.

The files depend on the input, its order and the tokenizer only, never on the number of processes.
"""

import argparse
import contextlib
import multiprocessing
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import batched
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_async.data.sources import (
    Format,
    Problems,
    ReadOptions,
    Record,
    Source,
    check_source,
    read_records,
    resolve_sources,
)
from megatron_async.data.tokenizer import build_tokenizer

if TYPE_CHECKING:
    from megatron_async.data.indexed import IndexedWriter

_DOCUMENTS_AT_ONCE = 64
# Batches that wait for each process: enough to keep it busy, few enough to bound the memory.
_BATCHES_AHEAD = 4


class InputError(ValueError):
    """Input that cannot be used; the message has one line for each problem."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class PreprocessOptions:
    """What to tokenize and where to put it.

    Attributes:
        inputs: files, patterns, folders or data set names, in this order.
        output_prefix: the files of key K are `{output_prefix}_{K}_document.bin` and `.idx`.
        input_format: how to read the inputs; None goes by their names.
        read: how documents are cut and which keys hold text.
        append_eod: end every document with the tokenizer's end-of-document token.
        workers: number of processes that tokenize.
        log_interval: documents between two calls of the progress function.
    """

    inputs: tuple[str, ...]
    output_prefix: str
    input_format: Format | None = None
    read: ReadOptions = field(default_factory=ReadOptions)
    append_eod: bool = False
    workers: int = 1
    log_interval: int = 1000

    def output(self, key: str) -> str:
        """Data prefix of a key's files."""
        return f"{self.output_prefix}_{key}_document"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the work is.

    Attributes:
        documents: documents written.
        empty: texts that gave no token and were left out.
        tokens: tokens written, over all keys.
        bytes: UTF-8 bytes of text written.
        seconds: since the first document.
    """

    documents: int = 0
    empty: int = 0
    tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Encoder:
    """Turns records into token ids; copied to every process."""

    tokenizer: Any
    append_eod: bool

    def __call__(self, records: Sequence[Record]) -> list[list[np.ndarray] | str]:
        """For each record its ids by key (int64, empty if the text gave none), or what is wrong with it."""
        return [self._encode(record) for record in records]

    def _encode(self, record: Record) -> list[np.ndarray] | str:
        try:
            return [self._ids(text) for text in record.texts]
        except Exception as error:  # tokenizers of any library, fed with any text
            return f"{record.where}: cannot be tokenized: {type(error).__name__}: {error}."

    def _ids(self, text: str) -> np.ndarray:
        ids = self.tokenizer.tokenize(text)
        if ids and self.append_eod:
            ids = [*ids, self.tokenizer.eod]
        return np.asarray(ids, dtype=np.int64)


def preprocess(
    options: PreprocessOptions,
    tokenizer_args: argparse.Namespace,
    on_progress: Callable[[Progress], None] | None = None,
) -> Progress:
    """Tokenize all inputs and write one data set for each key.

    Args:
        options: what and where.
        tokenizer_args: arguments of Megatron's tokenizer builder (`tokenizer_namespace`).
        on_progress: called every `log_interval` documents.

    Raises:
        InputError: for input that cannot be used. Everything that can be seen beforehand is reported before
            the work starts; bad lines met during the work stop the writing, and the rest is read for more of
            them. No output file is written or replaced then.
    """
    problems = Problems()
    sources = resolve_sources(options.inputs, options.input_format, problems)
    for source in sources:
        check_source(source, options.read, problems)
    _check_numbers(options, problems)
    _check_output(options.output_prefix, problems)
    tokenizer = _checked_tokenizer(tokenizer_args, options, problems)
    _raise_any(problems)
    return _write(sources, options, tokenizer, on_progress)


def _raise_any(problems: Problems) -> None:
    if problems.lines:
        more = ["There may be more."] if problems.full else []
        raise InputError([*problems.lines, *more])


def _check_numbers(options: PreprocessOptions, problems: Problems) -> None:
    for name, value in (("--workers", options.workers), ("--log-interval", options.log_interval)):
        if value < 1:
            problems.add(f"{name} {value}: at least 1 is needed.")
    if len(set(options.read.keys)) != len(options.read.keys) or not options.read.keys:
        problems.add(f"--json-keys {' '.join(options.read.keys)}: give each key once, and at least one.")


def _check_output(prefix: str, problems: Problems) -> None:
    """Try to write to the output folder, or to the folder it will be made in; also finds a full disk."""
    folder = Path(f"{prefix}_").parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        problems.add(f"--output-prefix {prefix}: cannot write to {folder}: {error.strerror}.")


def _checked_tokenizer(args: argparse.Namespace, options: PreprocessOptions, problems: Problems) -> Any:
    name = f"--tokenizer-type {args.tokenizer_type}"
    model = args.tokenizer_model
    if args.tokenizer_type == "NullTokenizer" and not args.vocab_size:
        problems.add(f"{name} needs --vocab-size.")
        return None
    # A hub name has the form owner/name. Anything longer is a path, and looking for it on the hub would take
    # a while.
    if model is not None and not Path(model).exists() and (model.startswith((".", "/", "~")) or model.count("/") > 1):
        problems.add(f"--tokenizer-model {model} does not exist.")
        return None
    try:
        tokenizer = build_tokenizer(args)
        eod = tokenizer.eod if options.append_eod else 0
    except Exception as error:  # many libraries stand behind the builder
        problems.add(f"{name}{f' --tokenizer-model {model}' if model else ''} cannot be built: {error}.")
        return None
    if eod is None:
        problems.add(f"{name} has no end-of-document token: leave --append-eod out or take another tokenizer.")
    return tokenizer


def _write(
    sources: Sequence[Source],
    options: PreprocessOptions,
    tokenizer: Any,
    on_progress: Callable[[Progress], None] | None,
) -> Progress:
    # Imports Megatron, which takes seconds: not before the input has been looked at.
    from megatron_async.data.indexed import IndexedWriter

    problems = Problems()
    began = time.monotonic()
    done = Progress()
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(IndexedWriter(options.output(key), tokenizer.vocab_size)) for key in options.read.keys
        ]
        encoded = _encoded(_records(sources, options.read, problems), Encoder(tokenizer, options.append_eod), options)
        for record, result in encoded:
            if isinstance(result, str):
                problems.add(result)
            if problems.lines:
                continue
            assert not isinstance(result, str)
            _add(writers, record, result, problems)
            done = Progress(
                documents=done.documents + 1,
                empty=done.empty + sum(not ids.size for ids in result),
                tokens=done.tokens + sum(ids.size for ids in result),
                bytes=done.bytes + sum(len(text.encode()) for text in record.texts),
                seconds=time.monotonic() - began,
            )
            if on_progress is not None and done.documents % options.log_interval == 0:
                on_progress(done)
        for writer, key in zip(writers, options.read.keys, strict=True):
            if not writer.documents and not problems.lines:
                problems.add(f"the input holds no text for key {key}: nothing to write.")
        _raise_any(problems)
        for writer in writers:
            writer.commit()
    return done


def _add(
    writers: Sequence["IndexedWriter"], record: Record, ids_by_key: Sequence[np.ndarray], problems: Problems
) -> None:
    try:
        for writer, ids in zip(writers, ids_by_key, strict=True):
            if ids.size:
                writer.add(ids)
    except ValueError as error:
        problems.add(f"{record.where}: {error}")


def _records(sources: Iterable[Source], options: ReadOptions, problems: Problems) -> Iterator[Record]:
    """All records up to the first problem; the rest is then only read for further problems."""
    for source in sources:
        for record in read_records(source, options, problems):
            if not problems.lines:
                yield record
            if problems.full:
                return


def _encoded(
    records: Iterable[Record], encoder: Encoder, options: PreprocessOptions
) -> Iterator[tuple[Record, list[np.ndarray] | str]]:
    """Records and their ids, in order."""
    batches = batched(records, _DOCUMENTS_AT_ONCE)
    if options.workers == 1:
        for batch in batches:
            yield from zip(batch, encoder(batch), strict=True)
        return
    # Forked processes share the tokenizer that is already loaded; its own threads must not be in use then.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(options.workers, context, _receive_encoder, (encoder,)) as pool:
        waiting: deque[tuple[tuple[Record, ...], Future[list[list[np.ndarray] | str]]]] = deque()
        for batch in batches:
            waiting.append((batch, pool.submit(_encode_in_worker, batch)))
            if len(waiting) >= options.workers * _BATCHES_AHEAD:
                done, results = waiting.popleft()
                yield from zip(done, results.result(), strict=True)
        for done, results in waiting:
            yield from zip(done, results.result(), strict=True)


# A pool hands a function to its processes by name, so what the function needs has to be a name of the module
# there.
_worker_encoder: Encoder | None = None


def _receive_encoder(encoder: Encoder) -> None:
    global _worker_encoder
    _worker_encoder = encoder


def _encode_in_worker(batch: tuple[Record, ...]) -> list[list[np.ndarray] | str]:
    assert _worker_encoder is not None
    return _worker_encoder(batch)
