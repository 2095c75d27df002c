# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The report of check-gpu, from sections that are stand-ins: no number may be missing, no error ends the others."""

import json

import pytest

from benchmarks.check_report import Result, Section, perform, write

MACHINE = {
    "versions": {"torch": "2.13"},
    "date": "2026-11-29",
    "commit": "abc",
    "processor": "some",
    "usable_cores": 2,
    "load_average": 0.5,
}
WHOLE = {"ms": {"2bw": 1.0}, "peak_bytes": [1]}


def outcome(result, figures=("ms", "peak_bytes")):
    (found,) = perform([Section("Speed", lambda: result, figures)])
    return found


def test_a_whole_result_is_ok():
    assert outcome(Result(dict(WHOLE))).status == "ok"


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("value", ["left out", None, {}, []])
def test_a_missing_number_fails_the_section_and_is_named(name, value):
    figures = {key: given for key, given in WHOLE.items() if key != name} | (
        {name: value} if value != "left out" else {}
    )
    found = outcome(Result(figures))
    assert (found.status, found.result.problems) == ("failed", [f"the figure '{name}' is missing"])


def test_zero_is_a_number():
    assert outcome(Result({"ms": 0.0}), ["ms"]).status == "ok"


def test_an_error_is_the_problem_of_its_section_alone():
    def fail():
        raise RuntimeError("out of memory")

    first, second = perform([Section("First", fail, []), Section("Second", lambda: Result({"ms": 1}), ["ms"])])
    assert (first.status, first.result.problems) == ("failed", ["RuntimeError: out of memory"])
    assert second.status == "ok"


def test_a_section_that_cannot_run_here_says_why_and_needs_no_numbers():
    assert outcome(Result(skipped="needs a GPU")).status == "not run"


def test_the_report_holds_every_section_with_its_text_and_its_problems(tmp_path):
    parts = [
        Section("Speed", lambda: Result({"ms": 2.5}, "| a table |", ["too slow"]), ["ms"]),
        Section("Device tests", lambda: Result(skipped="needs a GPU"), ["passed"]),
    ]
    path = write(tmp_path, "**Emulated.**", MACHINE, list(perform(parts)))
    text = path.read_text()
    assert "**Emulated.**" in text and "torch 2.13" in text and "commit abc" in text
    assert "| Speed | failed |" in text and "- **too slow**" in text and "| a table |" in text
    assert "## Device tests: not run\n\nneeds a GPU" in text
    speed, device = json.loads((tmp_path / "report.json").read_text())["sections"]
    assert speed["result"]["figures"] == {"ms": 2.5} and device["status"] == "not run"
