# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The command tools/show_schedule.py."""

import json

import pytest

from tests.refusals import check_refused
from tools import show_schedule as tool

SHAPE = ["--stages", "4", "--microbatches", "8"]


@pytest.mark.parametrize("name", ["1f1b", "2bw", "wpipe", "pipedream", "2bw-eager"])
def test_text_is_the_default(capsysbinary, name) -> None:
    assert tool.main(["--schedule", name, *SHAPE]) == 0
    text = capsysbinary.readouterr().out.decode()
    assert f"schedule {name}: 4 stages, 8 micro-batches, 4 batches" in text
    assert "rank 3 |" in text
    assert "live activations" in text


def test_json_on_standard_output(capsysbinary) -> None:
    assert tool.main(["--schedule", "2bw", *SHAPE, "--batches", "5", "--format", "json"]) == 0
    data = json.loads(capsysbinary.readouterr().out)
    assert (data["schedule"], data["batches"], data["bubble_share"]) == ("2bw", 5, 0.0)


def test_times_reach_the_simulation(capsysbinary) -> None:
    arguments = ["--schedule", "1f1b", *SHAPE, "--batches", "1", "--times", "10,30,7"]
    assert tool.main(arguments) == 0
    assert f"makespan {11 * 40 + 7}" in capsysbinary.readouterr().out.decode()


@pytest.mark.parametrize(("name", "bubble"), [("2bw", 0.2), ("2bw-eager", 0.0)])
def test_transfers_reach_the_simulation(capsysbinary, name, bubble) -> None:
    assert tool.main(["--schedule", name, *SHAPE, "--transfer", "0.5", "--format", "json"]) == 0
    assert json.loads(capsysbinary.readouterr().out)["bubble_share"] == pytest.approx(bubble, abs=1e-12)


@pytest.mark.parametrize(
    ("file_format", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("trace", b"{"), ("text", b"sch")]
)
def test_output_file(capsysbinary, tmp_path, file_format, start) -> None:
    output = tmp_path / f"schedule.{file_format}"
    output.write_bytes(b"old")
    arguments = [
        "--schedule",
        "wpipe",
        *SHAPE,
        "--batches",
        "2",
        "--format",
        file_format,
        "--output",
        str(output),
    ]
    assert tool.main(arguments) == 0
    assert output.read_bytes().startswith(start)
    assert capsysbinary.readouterr().out == b""
    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        ([], ["--schedule is required", "--stages is required", "--microbatches is required"]),
        (
            [
                "--schedule",
                "3bw",
                "--stages",
                "x",
                "--microbatches",
                "0",
                "--batches",
                "-1",
                "--times",
                "1,2",
                "--wrong",
            ]
            + ["--format", "gif"],
            [
                "unknown schedule '3bw'",
                "--stages 'x'",
                "--microbatches '0'",
                "--batches '-1'",
                "--times '1,2'",
                "unknown argument '--wrong'",
                "--format 'gif'",
            ],
        ),
        (
            ["--schedule", "2bw", "--stages", "8", "--microbatches", "4"],
            ["4 micro-batches and 8 stages", "use fewer"],
        ),
        (["--schedule", "wpipe", "--stages", "4", "--microbatches", "3"], ["3 micro-batches and 4 stages"]),
        (["--schedule", "2bw", *SHAPE, "--format", "png"], ["--format png needs --output FILE"]),
        (["--schedule", "2bw", *SHAPE, "--output", "/no/such/folder/x"], ["its folder does not exist"]),
        (["--schedule", "2bw", *SHAPE, "--output", "/"], ["--output /: is a folder"]),
        (["--schedule", "2bw", *SHAPE, "--times", "0,1,1"], ["--times '0,1,1'"]),
        (["--schedule", "2bw", *SHAPE, "--times", "1,inf,1"], ["--times '1,inf,1'"]),
        (["--schedule", "2bw", *SHAPE, "--transfer", "-1"], ["--transfer '-1'"]),
        (["--schedule"], ["argument --schedule: expected one argument"]),
    ],
)
def test_wrong_arguments_are_all_reported_with_status_2(capsys, arguments, messages) -> None:
    check_refused(capsys, tool.main, arguments, messages)
