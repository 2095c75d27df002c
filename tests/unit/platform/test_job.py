# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""What differs between the ranks of a job; that every rank ends with it is in tests/distributed/test_devices.py."""

from megatron_async.platform.job import Rank, differences, options, ranges

VERSIONS = {"torch": "2.13.0", "code of megatron_async": "abc"}


def rank(host: str, gpu: bool | None = None, arguments: str = "--lr 1", **versions: str) -> Rank:
    return Rank(gpu, VERSIONS | versions, arguments.split(), host)


def test_ranks_without_a_gpu_are_named_by_host():
    hosts = ["a"] * 8 + ["b"] * 4 + ["a", "b", "a", "c"]
    without = {8, 9, 10, 11, 13, 15}
    (text,) = differences([rank(host, number not in without) for number, host in enumerate(hosts)])
    assert text.startswith("6 of 16 ranks see no usable GPU (b: rank 8-11, 13; c: rank 15), the others do.")


def test_versions_code_and_arguments():
    assert list(differences([rank("a"), rank("b")])) == []
    other = rank("b", arguments="--lr=2 --bf16 --data-path 1 x", torch="2.12.0")
    assert list(differences([rank("a"), other, other])) == [
        "torch is 2.12.0 on b: rank 1-2, but 2.13.0 on a: rank 0. Install the same everywhere.",
        *(
            f"{flag} on b: rank 1-2, but {first} on a: rank 0. Start all hosts with the same arguments."
            for flag, first in (
                ("--lr is 2", "1"),
                ("--bf16 is given", "not given"),
                ("--data-path is 1 x", "not given"),
            )
        ),
    ]


def test_options_and_ranges():
    assert options("--a=1 --b 2 3 --c".split()) == {"--a": "1", "--b": "2 3", "--c": "given"}
    assert [ranges(numbers) for numbers in ([3], [0, 1, 2, 5, 7, 8])] == ["3", "0-2, 5, 7-8"]
