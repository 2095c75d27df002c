# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The command-line tools, called in this process."""

import json
from pathlib import Path

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_async.data.preprocessing.prepare import CorpusPaths
from tools import prepare_corpus, preprocess_data


def test_preprocess_with_megatron_flags(
    tmp_path: Path, corpus: CorpusPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "data.jsonl"
    source.write_text("".join(json.dumps({"text": f"def f{n}(): pass", "id": n}) + "\n" for n in range(5)))
    status = preprocess_data.main(
        [
            "--input",
            str(source),
            "--output-prefix",
            str(tmp_path / "out"),
            "--json-keys",
            "text",
            "--workers",
            "2",
        ]
        + ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(corpus.tokenizer)]
        + ["--append-eod", "--log-interval", "2", "--partitions", "1"]
    )
    captured = capsys.readouterr()
    assert status == 0
    assert "5 documents" in captured.out and f"{tmp_path / 'out'}_text_document" in captured.out
    assert captured.err.count("documents/s") == 2
    dataset = IndexedDataset(str(tmp_path / "out_text_document"))
    assert len(dataset) == 5 and all(int(sequence[-1]) == 0 for sequence in dataset)


def test_preprocess_reports_and_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = preprocess_data.main(
        ["--input", str(tmp_path / "absent.jsonl"), "--output-prefix", str(tmp_path / "out")]
        + ["--tokenizer-type", "NullTokenizer"]
    )
    error = capsys.readouterr().err
    assert status == 2
    assert "absent.jsonl does not exist" in error and "needs --vocab-size" in error and "Traceback" not in error
    assert not list(tmp_path.iterdir())


def test_prepare_corpus_prints_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "keep.txt").write_text("mine")
    assert prepare_corpus.main(["--output", str(tmp_path / "notes"), "--vocab-size", "300"]) == 2
    assert "keep.txt" in capsys.readouterr().err
    assert prepare_corpus.main(["--output", str(tmp_path / "corpus"), "--vocab-size", "10"]) == 2
    assert "vocabulary size 10 is too small" in capsys.readouterr().err


def test_prepare_corpus_names_the_files(
    tmp_path: Path, source_root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_async.data.preprocessing.stdlib_corpus.standard_library_root", lambda: source_root)
    assert prepare_corpus.main(["--output", str(tmp_path / "corpus"), "--vocab-size", "300"]) == 0
    output = capsys.readouterr().out
    assert f"--train-data-path {tmp_path / 'corpus' / 'train_text_document'}" in output
    assert "300 tokens" in output
