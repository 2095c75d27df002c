# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Single options of a command line, read without a parser."""

import pytest

from megatron_async.config.command_line import value_of, without
from megatron_async.config.parser import Parser, actions_given


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("--lr 1 --device cpu", "cpu"),
        ("--device=cpu --lr 1", "cpu"),
        ("--device cuda --device=cpu", "cpu"),
        ("--device=", ""),
        ("--devices 3", None),
        ("--device", None),
        ("", None),
    ],
)
def test_the_last_value_counts(words, value):
    assert value_of(words.split(), "--device") == value


def test_given_options_have_their_first_spelling_and_their_destination():
    parser = Parser()
    for flags, more in {("--lr",): {}, ("--no-split", "--whole"): {"action": "store_false", "dest": "split"}}.items():
        parser.add_argument(*flags, **more)
    assert actions_given(parser, "--lr=3 --whole --unknown 4 lr".split()) == {"lr": "lr", "no-split": "split"}


@pytest.mark.parametrize("words", ["--a 1 --b 2 3 --c", "--a 1 --b=2 --c"])
def test_an_option_is_left_out_with_its_values(words):
    assert without(words.split(), ["--b"]) == "--a 1 --c".split()
    assert without([*words.split(), "--b", "4"], ["--b", "--a"]) == ["--c"]
    assert without(words.split(), ["--d"]) == words.split()
