# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Tokenizes documents into Megatron's indexed data sets, with several processes.

The files depend on the input, its order and the tokenizer only, not on the number of processes.
"""

import argparse
import contextlib
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import batched, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_async.data.preprocessing.sources import (
    PreprocessOptions,
    Problem,
    Record,
    Source,
    check_source,
    read_records,
    resolve_sources,
)
from megatron_async.files import obstacle

if TYPE_CHECKING:
    from megatron_async.data.preprocessing.indexed import IndexedWriter

_DOCUMENTS_AT_ONCE = 64
# Batches queued for each process: enough to keep it busy, few enough to bound the memory.
_BATCHES_AHEAD = 4

# A report ends after this many problems.
_MOST_PROBLEMS = 20

Ids = list[np.ndarray]
"""Token ids of a record for each key: int64, shape (tokens,), empty if the text gave none."""


class InputError(ValueError):
    """Input that cannot be used; `problems` has one line each."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        more = ["There may be more."] if len(problems) >= _MOST_PROBLEMS else []
        self.problems = (*problems[:_MOST_PROBLEMS], *more)
        super().__init__("\n".join(self.problems))


@dataclass(slots=True)
class Progress:
    """Work done so far."""

    documents: int = 0
    empty: int = 0  # texts that gave no token and were left out
    tokens: int = 0  # over all keys
    bytes: int = 0  # of text, in UTF-8
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Encoder:
    """Turns records into token ids; copied to every process."""

    tokenizer: Any
    append_eod: bool

    def __call__(self, records: Sequence[Record]) -> list[Ids | Problem]:
        return [self._encode(record) for record in records]

    def _encode(self, record: Record) -> Ids | Problem:
        try:
            return [self._ids(text) for text in record.texts]
        except Exception as error:  # tokenizers of any library, fed with any text
            return f"{record.where}: cannot be tokenized: {type(error).__name__}: {error}."

    def _ids(self, text: str) -> np.ndarray:
        ids = self.tokenizer.tokenize(text)
        end = [self.tokenizer.eod] if ids and self.append_eod else []
        return np.asarray([*ids, *end], dtype=np.int64)


def preprocess(
    options: PreprocessOptions,
    tokenizer_args: argparse.Namespace,
    on_progress: Callable[[Progress], None] | None = None,
) -> Progress:
    """Tokenize all inputs and write one data set for each key.

    Args:
        options: inputs, outputs and settings.
        tokenizer_args: arguments of Megatron's tokenizer builder (`tokenizer_namespace`).
        on_progress: called every `log_interval` documents.

    Raises:
        InputError: unusable input. Problems that show beforehand are reported before the work starts. A bad record
            stops the writing; the rest is read for further problems. No output file is written or replaced.
        OSError: no room on the disk (names the file); a worker process died.
    """
    found = list(resolve_sources(options))
    sources = [source for source in found if isinstance(source, Source)]
    problems = [problem for problem in found if isinstance(problem, Problem)]
    for source in sources:
        problems += islice(check_source(source, options), _MOST_PROBLEMS)
    problems += _option_problems(options)
    tokenizer = _checked_tokenizer(tokenizer_args, options, problems)
    if problems:
        raise InputError(problems)
    return _write(sources, options, tokenizer, on_progress)


def _option_problems(options: PreprocessOptions) -> Iterator[Problem]:
    for name, value in (("--workers", options.workers), ("--log-interval", options.log_interval)):
        if value < 1:
            yield f"{name} {value}: at least 1 is needed."
    keys = options.keys
    if len(set(keys)) != len(keys) or not keys:
        yield f"--json-keys {' '.join(keys)}: give each key once, and at least one."
    if reason := obstacle(Path(f"{options.output('key')}.bin")):
        yield f"--output-prefix {options.output_prefix}: cannot write: {reason}."


def _checked_tokenizer(args: argparse.Namespace, options: PreprocessOptions, problems: list[Problem]) -> Any:
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    name, model = f"--tokenizer-type {args.tokenizer_type}", args.tokenizer_model
    if args.tokenizer_type == "NullTokenizer" and not args.vocab_size:
        problems.append(f"{name} needs --vocab-size.")
        return None
    # A name on the hub has the form owner/name. Anything else is a path; the hub would take long to deny it.
    if model is not None and not Path(model).exists() and (model.startswith((".", "/", "~")) or model.count("/") > 1):
        problems.append(f"--tokenizer-model {model} does not exist.")
        return None
    try:
        tokenizer = build_tokenizer(args)
        without_end = options.append_eod and tokenizer.eod is None
    except Exception as error:  # many libraries stand behind the builder
        problems.append(f"{name}{f' --tokenizer-model {model}' if model else ''} cannot be built: {error}.")
        return None
    if without_end:
        problems.append(f"{name} has no end-of-document token: leave --append-eod out or take another tokenizer.")
    return tokenizer


def _write(
    sources: Sequence[Source],
    options: PreprocessOptions,
    tokenizer: Any,
    on_progress: Callable[[Progress], None] | None,
) -> Progress:
    from megatron_async.data.preprocessing.indexed import IndexedWriter  # imports Megatron, which takes seconds

    problems: list[Problem] = []
    done, began = Progress(), time.monotonic()
    with contextlib.ExitStack() as stack:
        writers = {
            key: stack.enter_context(IndexedWriter(options.output(key), tokenizer.vocab_size)) for key in options.keys
        }
        records = _records(sources, options, problems)
        for record, ids in _encoded(records, Encoder(tokenizer, options.append_eod), options.workers):
            if isinstance(ids, Problem):
                problems.append(ids)
            elif not problems:
                problems += _add(writers.values(), record, ids)
                done.documents += 1
                done.empty += sum(not part.size for part in ids)
                done.tokens += sum(part.size for part in ids)
                done.bytes += sum(len(text.encode()) for text in record.texts)
                done.seconds = time.monotonic() - began
                if on_progress is not None and done.documents % options.log_interval == 0:
                    on_progress(done)
        missing = [key for key, writer in writers.items() if not writer.documents and not problems]
        problems += [f"the input holds no text for key {key}: nothing to write." for key in missing]
        if problems:
            raise InputError(problems)
        for writer in writers.values():
            writer.commit()
    return done


def _add(writers: Iterable["IndexedWriter"], record: Record, ids_by_key: Ids) -> Iterator[Problem]:
    try:
        for writer, ids in zip(writers, ids_by_key, strict=True):
            if ids.size:
                writer.add(ids)
    except ValueError as error:
        yield f"{record.where}: {error}"


def _records(sources: Iterable[Source], options: PreprocessOptions, problems: list[Problem]) -> Iterator[Record]:
    """All records up to the first problem; the rest is read only for further problems."""
    for source in sources:
        for item in read_records(source, options):
            if isinstance(item, Problem):
                problems.append(item)
            elif not problems:
                yield item
            if len(problems) >= _MOST_PROBLEMS:
                return


def _encoded(records: Iterable[Record], encoder: Encoder, workers: int) -> Iterator[tuple[Record, Ids | Problem]]:
    """Records and their ids, in order."""
    batches = batched(records, _DOCUMENTS_AT_ONCE)
    if workers == 1:
        for batch in batches:
            yield from zip(batch, encoder(batch), strict=True)
        return
    # Forked processes share the loaded tokenizer; its own threads must not be in use then.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    waiting: deque[tuple[tuple[Record, ...], Future[list[Ids | Problem]]]] = deque()
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, context, _receive_encoder, (encoder,)) as pool:
        try:
            for batch in batches:
                waiting.append((batch, pool.submit(_encode_in_worker, batch)))
                if len(waiting) >= workers * _BATCHES_AHEAD:
                    done, results = waiting.popleft()
                    yield from zip(done, results.result(), strict=True)
            for done, results in waiting:
                yield from zip(done, results.result(), strict=True)
        except BrokenProcessPool as error:
            raise ChildProcessError(
                "a worker process died, usually killed by the system for lack of memory: use fewer processes than "
                f"--workers {workers}"
            ) from error


# A pool passes functions to its processes by name, so the encoder has to be a global of the module there.
_worker_encoder: Encoder | None = None


def _receive_encoder(encoder: Encoder) -> None:
    global _worker_encoder
    _worker_encoder = encoder


def _encode_in_worker(batch: tuple[Record, ...]) -> list[Ids | Problem]:
    assert _worker_encoder is not None
    return _worker_encoder(batch)
