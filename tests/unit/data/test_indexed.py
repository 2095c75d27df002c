# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_async.data.preprocessing.indexed import IndexedWriter


@pytest.mark.parametrize(("vocab_size", "dtype"), [(300, np.uint16), (65499, np.uint16), (128_000, np.int32)])
def test_read_back(tmp_path: Path, vocab_size: int, dtype: type) -> None:
    documents = [[0], [5, vocab_size - 1, 7], list(range(200))]
    prefix = str(tmp_path / "new" / "data")
    with IndexedWriter(prefix, vocab_size) as writer:
        for document in documents:
            writer.add(document)
        writer.commit()
    assert (writer.documents, writer.tokens) == (3, 204)
    dataset = IndexedDataset(prefix)
    assert [sequence.tolist() for sequence in dataset] == documents
    assert dataset[0].dtype == dtype
    assert dataset.document_indices.tolist() == [0, 1, 2, 3]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["data.bin", "data.idx"]


def test_nothing_is_left_without_commit(tmp_path: Path) -> None:
    with IndexedWriter(str(tmp_path / "data"), 10) as writer:
        writer.add([1, 2])
    assert not list(tmp_path.iterdir())


def test_failed_rewrite_keeps_the_old_files(tmp_path: Path) -> None:
    prefix = str(tmp_path / "data")
    with IndexedWriter(prefix, 10) as writer:
        writer.add([1, 2])
        writer.commit()
    with (
        pytest.raises(ValueError, match="token id 10, but the vocabulary has 10"),
        IndexedWriter(prefix, 10) as writer,
    ):
        writer.add([3])
        writer.add([10])
    dataset = IndexedDataset(prefix)
    assert [sequence.tolist() for sequence in dataset] == [[1, 2]]
    assert len(list(tmp_path.iterdir())) == 2
