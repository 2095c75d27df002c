# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import pytest

from megatron_async.data.blend import data_sources, missing_data_files

from .conftest import MakeArguments, write_data


@pytest.fixture
def data(tmp_path: Path) -> dict[str, str]:
    counts = {"a": 1000, "b": 1000, "tiny": 3}
    return {name: write_data(tmp_path / name, [[1] * 9 + [999]] * count) for name, count in counts.items()}


def test_good_arguments(data: dict[str, str], make_arguments: MakeArguments) -> None:
    a, b, tiny = data["a"], data["b"], data["tiny"]
    for words in (
        ("--mock-data",),
        ("--data-path", a),
        ("--data-path", a, b),
        ("--data-path", a, b, a, "--split", "95,5,0"),
        ("--data-path", "0.3", a, "7", b),
        ("--data-path", tiny, "--split", "1,1,1"),
        ("--data-path", tiny, "--split", "100"),
        ("--train-data-path", a, "--valid-data-path", tiny),
        ("--train-data-path", "1", a, "2", b, "--valid-data-path", tiny, "--full-validation"),
        ("--data-path", "s3://bucket/data"),
    ):
        assert missing_data_files(make_arguments(*words)) == [], words


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "no training data"),
        (("--mock-data", "--data-path", "{a}"), "--mock-data and --data-path exclude each other"),
        (("--data-path", "{a}", "--train-data-path", "{b}"), "exclude each other"),
        (("--data-path",), "--data-path is empty"),
        (("--data-path", "none"), "data prefix none: none.bin and none.idx do not exist."),
        (("--data-path", "{a}.bin"), "Leave the ending out"),
        (("--data-path", "0.0", "{a}", "1", "{b}"), "weight 0.0 of"),
        (("--data-path", "-1", "{a}"), "weight -1 of"),
        (("--data-path", "nan", "{a}", "1", "{b}"), "weight nan of"),
        (("--data-path", "inf", "{a}", "1", "{b}"), "weight inf of"),
        (("--data-path", "0.3", "{a}", "{b}"), "must take turns"),
        (("--data-path", "{a}", "0.3", "{b}", "0.7"), "0.3, 0.7 cannot be assigned"),
        (("--data-path", "0.3", "{a}", "{b}", "{b}"), "must take turns"),
        (("--data-path", "{tiny}"), "asks for valid, test data, but {tiny} has 3 documents"),
        (("--data-path", "{a}", "--split", "0,1,0"), "--split 0,1,0: give up to three numbers"),
        (("--data-path", "{a}", "--split", "1,2,3,4"), "--split 1,2,3,4: give up to three numbers"),
        (("--data-path", "{a}", "--split", "90,-5,5"), "--split 90,-5,5: give up to three numbers"),
        (("--data-path", "1", "{a}", "1", "{b}", "--full-validation"), "weights have no meaning"),
        (("--valid-data-path", "{a}"), "give --train-data-path"),
        (("--data-args-path", "none.txt"), "--data-args-path none.txt cannot be read"),
        (("--per-split-data-args-path", "none.json"), "none.json cannot be read"),
    ],
)
def test_bad_arguments(
    data: dict[str, str], make_arguments: MakeArguments, words: tuple[str, ...], expected: str
) -> None:
    args = make_arguments()
    # argparse takes a negative weight for an option, so the words are set where it would put them.
    option = None
    for word in words:
        if word.startswith("--"):
            option = word[2:].replace("-", "_")
            setattr(args, option, [] if option.endswith("data_path") else True)
        elif option is not None and option.endswith("data_path"):
            getattr(args, option).append(word.format(**data))
        elif option is not None:
            setattr(args, option, word)
    problems = missing_data_files(args)
    assert len([line for line in problems if expected.format(**data) in line]) == 1, problems


def test_all_problems_in_one_list(data: dict[str, str], make_arguments: MakeArguments) -> None:
    args = make_arguments("--data-path", "0", data["a"], "1", "x", "1", "y", "--split", "none")
    assert len(missing_data_files(args)) == 4


def test_single_missing_file(data: dict[str, str], make_arguments: MakeArguments) -> None:
    Path(data["a"] + ".bin").unlink()
    assert missing_data_files(make_arguments("--data-path", data["a"])) == [
        f"data prefix {data['a']}: {data['a']}.bin does not exist."
    ]


@pytest.mark.parametrize("content", [b"", b"MMIDIDX", b"x" * 64])
def test_file_that_is_no_index(data: dict[str, str], make_arguments: MakeArguments, content: bytes) -> None:
    Path(data["a"] + ".idx").write_bytes(content)
    (problem,) = missing_data_files(make_arguments("--train-data-path", data["a"]))
    assert "is not a Megatron index" in problem


def test_files_that_do_not_belong_together(data: dict[str, str], make_arguments: MakeArguments) -> None:
    """Another run's tokens, or a copy that was cut off."""
    tokens = Path(data["a"] + ".bin")
    whole = tokens.read_bytes()
    for content in (whole[:-2], whole + b"xx", Path(data["tiny"] + ".bin").read_bytes()):
        tokens.write_bytes(content)
        (problem,) = missing_data_files(make_arguments("--train-data-path", data["a"]))
        assert f"describes {len(whole)} bytes of tokens, but {tokens} has {len(content)}" in problem


def test_index_without_documents(tmp_path: Path, make_arguments: MakeArguments) -> None:
    prefix = write_data(tmp_path / "empty", [])
    (problem,) = missing_data_files(make_arguments("--train-data-path", prefix))
    assert "lists no documents" in problem


def test_argument_files(data: dict[str, str], tmp_path: Path, make_arguments: MakeArguments) -> None:
    (tmp_path / "shared.txt").write_text(f"0.25 {data['a']}\n0.75 {data['b']}\n")
    sources = data_sources(make_arguments("--data-args-path", tmp_path / "shared.txt"))
    assert sources.blend == ([data["a"], data["b"]], [0.25, 0.75])

    table = {"train": [0.5, data["a"], 0.5, data["b"]], "valid": f"{data['tiny']}", "test": None}
    (tmp_path / "split.json").write_text(json.dumps(table))
    args = make_arguments("--per-split-data-args-path", tmp_path / "split.json")
    assert missing_data_files(args) == []
    assert list(data_sources(args).prefixes()) == [data["a"], data["b"], data["tiny"]]

    (tmp_path / "split.json").write_text('{"train": ["none"]}')
    problems = missing_data_files(args)
    assert any("has no valid, test" in line for line in problems)
    assert any("none.bin and none.idx" in line for line in problems)


def test_agrees_with_megatron(data: dict[str, str], make_arguments: MakeArguments) -> None:
    from megatron.core.datasets.utils import get_blend_from_list

    for words in ([data["a"]], [data["a"], data["b"]], ["3", data["a"], "7", data["b"]], ["1", data["a"]]):
        prefixes, weights = get_blend_from_list(words)
        assert data_sources(make_arguments("--data-path", *words)).blend == (list(prefixes), weights)
