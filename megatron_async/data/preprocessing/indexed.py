# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Writes Megatron's indexed data sets (`PREFIX.bin`, `PREFIX.idx`); readers never see an incomplete one."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import numpy as np
from megatron.core.datasets.indexed_dataset import (
    DType,
    IndexedDatasetBuilder,
    get_bin_path,
    get_idx_path,
)
from numpy.typing import ArrayLike


class IndexedWriter:
    """Writes one data set document by document; `commit` publishes it under its prefix.

    As a context manager it removes everything that was not committed. Tokens take 2 bytes where the vocabulary allows
    it, else 4. Where the disk is full, the OSError names the file.

    Attributes:
        documents: number of documents added.
        tokens: number of tokens added.
    """

    def __init__(self, prefix: str, vocab_size: int) -> None:
        self.prefix = prefix
        self.documents = 0
        self.tokens = 0
        self._vocab_size = vocab_size
        self._temporary = f"{prefix}.writing-{os.getpid()}"
        Path(prefix).parent.mkdir(parents=True, exist_ok=True)
        self._builder = IndexedDatasetBuilder(get_bin_path(self._temporary), dtype=DType.optimal_dtype(vocab_size))

    def add(self, ids: ArrayLike) -> None:
        """Add one document.

        Args:
            ids: token ids, shape (tokens,), at least one.

        Raises:
            ValueError: an id is outside the vocabulary.
        """
        array = np.asarray(ids, dtype=np.int64)
        assert array.ndim == 1 and array.size > 0
        if array.min() < 0 or array.max() >= self._vocab_size:
            outside = array[(array < 0) | (array >= self._vocab_size)][0]
            raise ValueError(
                f"document {self.documents} holds token id {outside}, but the vocabulary has {self._vocab_size} tokens "
                f"(0 to {self._vocab_size - 1}). The tokenizer and its vocabulary size do not fit together."
            )
        with self._named_errors():
            self._builder.add_document(array, [array.size])
        self.documents += 1
        self.tokens += array.size

    def commit(self) -> None:
        """Finish both files and rename them."""
        with self._named_errors():
            self._builder.finalize(get_idx_path(self._temporary))
        # Without an index nothing can be read, so a new file is never paired with an old one.
        Path(get_idx_path(self.prefix)).unlink(missing_ok=True)
        os.replace(get_bin_path(self._temporary), get_bin_path(self.prefix))
        os.replace(get_idx_path(self._temporary), get_idx_path(self.prefix))

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, get_bin_path(self.prefix)) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):  # closing writes what is buffered, and the disk may be full
            self._builder.data_file.close()
        for path in (get_bin_path(self._temporary), get_idx_path(self._temporary)):
            Path(path).unlink(missing_ok=True)
