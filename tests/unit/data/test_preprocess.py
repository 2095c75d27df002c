# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
import argparse
import gzip
import json
import os
import random
import resource
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

from megatron_async.data.preprocessing.preprocess import Encoder, InputError, PreprocessOptions, Progress, preprocess
from megatron_async.data.preprocessing.sources import Record
from megatron_async.data.preprocessing.tokenizer import tokenizer_namespace

END = 999


def numbers_tokenizer() -> argparse.Namespace:
    """Text of numbers in, the numbers out: expected ids are plain to see."""
    return tokenizer_namespace(tokenizer_type="NullTokenizer", vocab_size=1000)


def run(
    inputs: Sequence[Path | str],
    output: Path,
    *,
    tokenizer: argparse.Namespace | None = None,
    **options: Any,
) -> Progress:
    return preprocess(
        PreprocessOptions(inputs=tuple(map(str, inputs)), output_prefix=str(output), **options),
        tokenizer or numbers_tokenizer(),
    )


def read(prefix: Path | str) -> list[list[int]]:
    dataset = IndexedDataset(str(prefix))
    return [sequence.tolist() for sequence in dataset]


def write_json_lines(path: Path, records: Sequence[object]) -> Path:
    content = "".join(json.dumps(record) + "\n" for record in records)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(content.encode()))
    else:
        path.write_text(content)
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out" / "data"


RECORDS = [{"text": "1 2 3"}, {"text": "4"}, {"text": "5 6"}]
IDS = [[1, 2, 3], [4], [5, 6]]


@pytest.mark.parametrize("name", ["data.jsonl", "data.json", "data.jsonl.gz"])
def test_json_lines(tmp_path: Path, out: Path, name: str) -> None:
    done = run([write_json_lines(tmp_path / name, RECORDS)], out)
    assert read(f"{out}_text_document") == IDS
    assert (done.documents, done.tokens, done.empty, done.bytes) == (3, 6, 0, 9)
    assert sorted(path.name for path in out.parent.iterdir()) == [
        "data_text_document.bin",
        "data_text_document.idx",
    ]


def test_end_of_document_token(tmp_path: Path, out: Path) -> None:
    run([write_json_lines(tmp_path / "data.jsonl", RECORDS)], out, append_eod=True)
    assert read(f"{out}_text_document") == [[*ids, END] for ids in IDS]


def test_several_keys(tmp_path: Path, out: Path) -> None:
    source = write_json_lines(tmp_path / "data.jsonl", [{"a": "1", "b": "2 3"}, {"b": "5", "a": "4", "c": 0}])
    run([source], out, keys=("a", "b"))
    assert read(f"{out}_a_document") == [[1], [4]]
    assert read(f"{out}_b_document") == [[2, 3], [5]]


def test_byte_order_mark_and_blank_lines(tmp_path: Path, out: Path) -> None:
    (tmp_path / "data.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "1"}\r\n\r\n{"text": "2"}')
    run([tmp_path / "data.jsonl"], out)
    assert read(f"{out}_text_document") == [[1], [2]]


@pytest.mark.parametrize(
    ("unit", "expected"), [("file", None), ("paragraph", [[1, 2], [3], [4]]), ("line", [[1], [2], [3], [4]])]
)
def test_plain_text(tmp_path: Path, out: Path, corpus: Any, unit: Any, expected: Any) -> None:
    if unit == "file":  # a real tokenizer, because line ends are no numbers
        tokenizer = tokenizer_namespace(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(corpus.tokenizer))
        texts = {"a.txt": "def one():\n\n    return 1\n", "b.txt": "naïve 日本語\n"}
        for name, text in texts.items():
            (tmp_path / name).write_text(text, encoding="utf-8")
        run([tmp_path / "*.txt"], out, tokenizer=tokenizer)
        built = build_tokenizer(tokenizer)
        assert [built.detokenize(ids) for ids in read(f"{out}_text_document")] == list(texts.values())
        return
    lines = "1\n2\n3\n4\n" if unit == "line" else "1 2\n\n \n3\n\n4"
    (tmp_path / "a.txt").write_text(lines)
    run([tmp_path / "a.txt"], out, tokenizer=numbers_tokenizer(), text_unit=unit)
    assert read(f"{out}_text_document") == expected


def test_parquet(tmp_path: Path, out: Path) -> None:
    datasets.Dataset.from_list([{**record, "other": 1} for record in RECORDS]).to_parquet(tmp_path / "data.parquet")
    run([tmp_path / "data.parquet"], out)
    assert read(f"{out}_text_document") == IDS


def test_saved_data_sets(tmp_path: Path, out: Path) -> None:
    saved = datasets.Dataset.from_list(RECORDS)
    saved.save_to_disk(tmp_path / "plain")
    datasets.DatasetDict(train=saved, test=saved.select([2])).save_to_disk(tmp_path / "parts")
    run([tmp_path / "plain"], out)
    assert read(f"{out}_text_document") == IDS
    run([tmp_path / "parts"], out, dataset_split="test")
    assert read(f"{out}_text_document") == [[5, 6]]


def test_folder_that_load_dataset_understands(tmp_path: Path, out: Path) -> None:
    (tmp_path / "folder").mkdir()
    write_json_lines(tmp_path / "folder" / "train.jsonl", RECORDS)
    run([tmp_path / "folder"], out)
    assert read(f"{out}_text_document") == IDS


def test_inputs_keep_their_order(tmp_path: Path, out: Path) -> None:
    for name in ("b", "a", "c"):
        write_json_lines(tmp_path / f"part_{name}.jsonl", [{"text": str(ord(name))}])
    first = write_json_lines(tmp_path / "zero.jsonl.gz", [{"text": "0"}])
    run([first, tmp_path / "part_*.jsonl"], out)
    assert read(f"{out}_text_document") == [[0], [97], [98], [99]]


def test_workers_do_not_change_the_bytes(tmp_path: Path) -> None:
    generator = random.Random(0)
    records = [
        {"text": " ".join(str(generator.randrange(900)) for _ in range(generator.randrange(1, 40)))} for _ in range(900)
    ]
    source = write_json_lines(tmp_path / "data.jsonl", records)
    seen: list[int] = []
    for workers in (1, 2):
        output = tmp_path / str(workers)
        preprocess(
            PreprocessOptions(
                inputs=(str(source),), output_prefix=str(output), workers=workers, log_interval=200, append_eod=True
            ),
            numbers_tokenizer(),
            lambda progress: seen.append(progress.documents),
        )
    for suffix in ("bin", "idx"):
        one, two = (tmp_path / f"{workers}_text_document.{suffix}" for workers in (1, 2))
        assert one.read_bytes() == two.read_bytes()
    assert len(read(tmp_path / "2_text_document")) == 900
    assert seen == [200, 400, 600, 800] * 2


def test_texts_without_tokens_are_left_out(tmp_path: Path, out: Path, corpus: Any) -> None:
    source = write_json_lines(tmp_path / "data.jsonl", [{"text": ""}, {"text": "x"}, {"text": ""}])
    tokenizer = tokenizer_namespace(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(corpus.tokenizer))
    done = run([source], out, tokenizer=tokenizer, append_eod=True)
    assert (done.documents, done.empty, len(read(f"{out}_text_document"))) == (3, 2, 1)


# Bad input


def problems_of(inputs: Sequence[Path | str], out: Path, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        run(inputs, out, **options)
    assert not out.parent.exists() or not list(out.parent.iterdir())
    return str(caught.value)


def test_everything_is_reported_at_once(tmp_path: Path, out: Path) -> None:
    good = write_json_lines(tmp_path / "good.jsonl", RECORDS)
    write_json_lines(tmp_path / "keyless.jsonl", [{"content": "1"}])
    (tmp_path / "odd.xyz").write_text("1")
    message = problems_of(
        [
            tmp_path / "absent.jsonl",
            tmp_path / "*.none",
            tmp_path / "keyless.jsonl",
            tmp_path / "odd.xyz",
            good,
            good,
        ],
        out,
        workers=0,
        tokenizer=tokenizer_namespace(tokenizer_type="NullTokenizer"),
    )
    for expected in (
        "absent.jsonl does not exist",
        "*.none matches no file",
        "keyless.jsonl, line 1: no key text; there are content.",
        "odd.xyz: the format is not clear",
        "good.jsonl is named 2 times",
        "--workers 0: at least 1",
        "NullTokenizer needs --vocab-size",
    ):
        assert expected in message


@pytest.mark.parametrize("workers", [1, 2])
def test_bad_lines_far_down(tmp_path: Path, out: Path, workers: int) -> None:
    lines = [json.dumps({"text": str(number)}) for number in range(300)]
    lines[199] = '{"text": "1"'
    lines[249] = '["1"]'
    lines[259] = '{"text": 7}'
    lines[269] = '{"text": "\xff"}'
    (tmp_path / "data.jsonl").write_bytes("\n".join(lines).encode("latin-1"))
    message = problems_of([tmp_path / "data.jsonl"], out, workers=workers)
    assert "data.jsonl, line 200: not a JSON object" in message
    assert "data.jsonl, line 250: one JSON object a line is needed, found list" in message
    assert "data.jsonl, line 260: text holds int, text is needed" in message
    assert "data.jsonl, line 270: not a JSON object in UTF-8" in message
    assert len(message.splitlines()) == 4


def test_long_lists_are_cut(tmp_path: Path, out: Path) -> None:
    (tmp_path / "data.jsonl").write_text("nonsense\n" * 1000)
    lines = problems_of([tmp_path / "data.jsonl"], out).splitlines()
    assert len(lines) == 21 and lines[-1] == "There may be more."


@pytest.mark.parametrize(
    ("content", "expected"),
    [("", "holds no text for key text"), ("\n\n", "holds no text for key text")],
)
def test_empty_input(tmp_path: Path, out: Path, content: str, expected: str) -> None:
    (tmp_path / "data.jsonl").write_text(content)
    assert expected in problems_of([tmp_path / "data.jsonl"], out)


def test_text_that_cannot_be_tokenized(tmp_path: Path, out: Path) -> None:
    source = write_json_lines(tmp_path / "data.jsonl", [{"text": "1"}, {"text": "word"}])
    assert "data.jsonl, line 2: cannot be tokenized" in problems_of([source], out)


def test_token_outside_the_vocabulary(tmp_path: Path, out: Path) -> None:
    source = write_json_lines(tmp_path / "data.jsonl", [{"text": "1"}, {"text": "1 1000"}])
    message = problems_of([source], out)
    assert "data.jsonl, line 2" in message and "token id 1000, but the vocabulary has 1000" in message


def test_damaged_files(tmp_path: Path, out: Path) -> None:
    whole = gzip.compress(b'{"text": "1"}\n' * 5000)
    (tmp_path / "torn.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "fake.jsonl.gz").write_bytes(b'{"text": "1"}\n')
    (tmp_path / "fake.parquet").write_bytes(b"PAR1 nothing")
    (tmp_path / "latin1.txt").write_bytes("café".encode("latin-1"))
    message = problems_of(sorted(tmp_path.glob("*.*")), out)
    for name in ("fake.jsonl.gz", "fake.parquet", "latin1.txt"):
        assert f"{name} cannot be read" in message
    assert "torn.jsonl.gz cannot be read" in problems_of([tmp_path / "torn.jsonl.gz"], out)


def test_data_sets_without_the_key_or_split(tmp_path: Path, out: Path) -> None:
    saved = datasets.Dataset.from_list([{"content": "1"}])
    saved.save_to_disk(tmp_path / "plain")
    saved.to_parquet(tmp_path / "data.parquet")
    datasets.DatasetDict(train=saved).save_to_disk(tmp_path / "parts")
    message = problems_of([tmp_path / "plain", tmp_path / "data.parquet"], out)
    assert "plain: no key text; there are content." in message
    assert "data.parquet: no key text; there are content." in message
    assert "parts cannot be read" in problems_of([tmp_path / "parts"], out, dataset_split="test")


def test_missing_value_in_a_row(tmp_path: Path, out: Path) -> None:
    datasets.Dataset.from_list([{"text": "1"}, {"text": None}]).to_parquet(tmp_path / "data.parquet")
    assert "data.parquet, row 2: text holds NoneType" in problems_of([tmp_path / "data.parquet"], out)


def test_plain_text_has_one_key(tmp_path: Path, out: Path) -> None:
    (tmp_path / "a.txt").write_text("1")
    assert "has the key text only, not a, b" in problems_of([tmp_path / "a.txt"], out, keys=("a", "b"))


def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    source = write_json_lines(tmp_path / "data.jsonl", RECORDS)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match=r"--output-prefix .*file/data: cannot write"):
        run([source], tmp_path / "file" / "data")


def test_tokenizer_folder_that_does_not_exist(tmp_path: Path, out: Path) -> None:
    source = write_json_lines(tmp_path / "data.jsonl", RECORDS)
    tokenizer = tokenizer_namespace(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "absent"))
    assert "absent does not exist" in problems_of([source], out, tokenizer=tokenizer)


def test_failed_run_keeps_the_previous_files(tmp_path: Path, out: Path) -> None:
    source = write_json_lines(tmp_path / "data.jsonl", RECORDS)
    run([source], out)
    write_json_lines(source, [*RECORDS, {"text": 1}])
    with pytest.raises(InputError, match="line 4"):
        run([source], out)
    assert read(f"{out}_text_document") == IDS


def test_a_killed_worker_ends_the_work(tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_json_lines(tmp_path / "data.jsonl", [{"text": str(number)} for number in range(600)])
    run([source], out)
    before = Path(f"{out}_text_document.bin").read_bytes()

    def killed(self: Encoder, record: Record) -> list[np.ndarray]:
        if record.texts == ("300",):
            os.kill(os.getpid(), signal.SIGKILL)
        return [np.array([1])]

    monkeypatch.setattr(Encoder, "_encode", killed)
    with pytest.raises(ChildProcessError, match=r"worker process died.*use fewer processes than --workers 2"):
        run([source], out, workers=2)
    assert Path(f"{out}_text_document.bin").read_bytes() == before
    assert len(list(out.parent.iterdir())) == 2


def test_a_full_disk_names_the_file_and_leaves_nothing(tmp_path: Path, out: Path) -> None:
    source = write_json_lines(tmp_path / "data.jsonl", [{"text": " ".join(["1 2 3"] * 1000)} for _ in range(100)])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*data_text_document\.bin'"):
            run([source], out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(out.parent.iterdir())
