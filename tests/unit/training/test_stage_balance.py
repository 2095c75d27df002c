# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Hints about slow stages, from measured times."""

import pytest

from megatron_async import platform

platform.activate("cpu")

from megatron_async.config import arguments  # noqa: E402
from megatron_async.training.stage_balance import Expected  # noqa: E402

LINE = (
    "--device cpu --dry-run --model tiny --num-layers 12 --pipeline-model-parallel-size 4 --pipeline-schedule 2bw "
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 200"
)


@pytest.fixture
def expected(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")

    def make(words: str = "") -> Expected | None:
        return Expected.of(arguments.parse([*LINE.split(), *words.split()]))

    return make


def test_a_slow_stage_gives_a_layer_away(expected):
    made = expected()
    hint = made.hint([1.0, 1.0, 1.0, 2.0])
    assert hint.startswith("stage 3 is 100% slower than the others: --pipeline-model-parallel-layout 'Et*")
    sizes = [
        word.count("t") if "*" not in word else int(word.strip("EL'")[2:]) for word in hint.split("'")[1].split("|")
    ]
    assert sum(sizes) == 12 and sizes[3] < 3
    assert "faster; a resume may take it" in hint


def test_even_stages_give_no_hint_and_a_slow_layer_is_not_moved_in_vain(expected):
    made = expected()
    assert made.hint([1.0, 1.04, 1.0, 1.0]) is None
    few = expected("--num-layers 4")
    assert "no other split is faster" in few.hint([1.0, 1.2, 1.0, 1.0])


def test_both_halves_of_a_stage_count(expected):
    made = expected("--num-layers 16 --pipeline-schedule wpipe --untie-embeddings-and-output-weights")
    hint = made.hint([1.0, 1.0, 1.0, 2.0])
    words = hint.split("'")[1].split("|")
    assert len(words) == 8 and "make the slowest stage" in hint


def test_too_few_layers_for_another_split(expected):
    made = expected("--num-layers 3 --pipeline-model-parallel-layout E|t|t|tL")
    assert "no other split is faster" in made.hint([1.0, 1.0, 1.0, 2.0])


def test_runs_without_a_report(expected):
    assert expected("--log-stage-balance 0") is None
    assert expected("--train-iters 99") is None
    assert expected("--pipeline-schedule 1f1b") is None


def test_the_values_of_a_batch(expected):
    read = expected().report([1.0, 1.0, 1.0, 1.5])
    assert (
        read["stage_compute_ms"] == [1000.0, 1000.0, 1000.0, 1500.0] and "stage 3 is 50% slower" in read["stage_hint"]
    )
    unknown = expected().report([0.0] * 4)
    assert "stage_hint" not in unknown
