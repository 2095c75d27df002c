# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from tokenizers import Tokenizer

from megatron_async.data.preprocessing import indexed, prepare
from megatron_async.data.preprocessing.prepare import CorpusPaths, prepare_corpus
from megatron_async.data.preprocessing.stdlib_corpus import read_corpus
from megatron_async.data.preprocessing.tokenizer import train_tokenizer

from .conftest import write_sources


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def times(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_files_hold_the_tokens_of_the_documents(corpus: CorpusPaths, source_root: Path) -> None:
    tokenizer = Tokenizer.from_file(str(corpus.tokenizer / "tokenizer.json"))
    train, valid = (list(part.values()) for part in read_corpus(source_root))
    for prefix, documents, counts in (
        (corpus.train_prefix, train, corpus.train),
        (corpus.valid_prefix, valid, corpus.valid),
    ):
        dataset = IndexedDataset(prefix)
        assert len(dataset) == len(documents) == counts.documents
        for sequence, document in zip(dataset, documents, strict=True):
            assert sequence.tolist() == [*tokenizer.encode(document).ids, 0]
        assert int(dataset.sequence_lengths.sum()) == counts.tokens
        assert sum(len(document.encode()) for document in documents) == counts.bytes


def test_same_input_gives_the_same_bytes(corpus: CorpusPaths, source_root: Path, tmp_path: Path) -> None:
    again = prepare_corpus(tmp_path / "elsewhere", 300, root=source_root)
    assert contents(again.folder) == contents(corpus.folder)
    assert (again.train, again.valid, again.vocab_size) == (corpus.train, corpus.valid, corpus.vocab_size)


def test_second_call_reuses(tmp_path: Path, source_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare_corpus(tmp_path / "corpus", 300, root=source_root)
    before = times(first.folder)
    monkeypatch.setattr(prepare, "train_tokenizer", None)  # any call would fail
    assert prepare_corpus(tmp_path / "corpus", 300, root=source_root) == first
    assert times(first.folder) == before


def test_changed_input_is_rebuilt(tmp_path: Path) -> None:
    root = write_sources(tmp_path / "sources", 8)
    first = prepare_corpus(tmp_path / "corpus", 300, root=root)
    old = contents(first.folder)
    (root / "package_1" / "module_01.py").write_text("changed = True\n")
    second = prepare_corpus(tmp_path / "corpus", 300, root=root)
    assert contents(second.folder) != old
    assert prepare_corpus(tmp_path / "corpus", 290, root=root).vocab_size == 290


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "no manifest", "torn manifest"])
def test_damaged_folder_is_rebuilt(tmp_path: Path, damage: str) -> None:
    root = write_sources(tmp_path / "sources", 8)
    folder = prepare_corpus(tmp_path / "corpus", 300, root=root).folder
    good = contents(folder)
    data = folder / "train_text_document.bin"
    match damage:
        case "truncated":
            data.write_bytes(good[data.name][:-2])
        case "flipped":
            data.write_bytes(bytes([good[data.name][0] ^ 1]) + good[data.name][1:])
        case "missing":
            data.unlink()
        case "no manifest":
            (folder / "manifest.json").unlink()
        case "torn manifest":
            (folder / "manifest.json").write_bytes(good["manifest.json"][:100])
    prepare_corpus(folder, 300, root=root)
    assert contents(folder) == good


def test_interrupted_build_leaves_nothing_that_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_sources(tmp_path / "sources", 8)

    def killed(*_: object) -> None:
        os._exit(9)  # as a kill does: no cleanup runs

    context = multiprocessing.get_context("fork")
    with monkeypatch.context() as patch:
        patch.setattr(indexed.IndexedWriter, "add", killed)
        process = context.Process(target=prepare_corpus, args=(tmp_path / "corpus", 300), kwargs={"root": root})
        process.start()
        process.join(30)
    assert process.exitcode == 9
    assert not (tmp_path / "corpus").exists()
    assert list(tmp_path.glob(".corpus.building-*"))
    prepare_corpus(tmp_path / "corpus", 300, root=root)
    assert not list(tmp_path.glob(".corpus.building-*"))


def test_of_processes_at_the_same_time_one_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_sources(tmp_path / "sources", 8)
    builds = tmp_path / "builds"

    def counted(*arguments: Any) -> Tokenizer:
        with builds.open("a") as file:
            file.write("build\n")
        time.sleep(0.3)  # long enough for the others to arrive
        return train_tokenizer(*arguments)

    context = multiprocessing.get_context("fork")
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "train_tokenizer", counted)
        processes = [
            context.Process(target=prepare_corpus, args=(tmp_path / "corpus", 300), kwargs={"root": root})
            for _ in range(3)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert builds.read_text() == "build\n"
    expected = prepare_corpus(tmp_path / "alone", 300, root=root)
    assert contents(tmp_path / "corpus") == contents(expected.folder)


@pytest.mark.parametrize("with_corpus", [False, True])
def test_foreign_files_are_not_removed(tmp_path: Path, with_corpus: bool) -> None:
    root = write_sources(tmp_path / "sources", 8)
    folder = tmp_path / "precious"
    if with_corpus:
        prepare_corpus(folder, 300, root=root)
    else:
        folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"1 entries that do not belong.*thesis\.tex"):
        prepare_corpus(folder, 280, root=root)
    assert (folder / "thesis.tex").read_text() == "years of work"


def test_file_in_place_of_the_folder(tmp_path: Path, source_root: Path) -> None:
    (tmp_path / "corpus").write_text("a file")
    with pytest.raises(ValueError, match="is a file"):
        prepare_corpus(tmp_path / "corpus", 300, root=source_root)


def test_arguments_name_existing_files(corpus: CorpusPaths) -> None:
    words = corpus.megatron_arguments()
    options = dict(zip(words[::2], words[1::2], strict=True))
    assert options["--tokenizer-type"] == "HuggingFaceTokenizer"
    assert Path(options["--tokenizer-model"], "tokenizer.json").is_file()
    assert IndexedDataset.exists(options["--train-data-path"])
    assert IndexedDataset.exists(options["--valid-data-path"])
    assert json.loads((corpus.folder / "manifest.json").read_text())["vocab_size"] == 300
