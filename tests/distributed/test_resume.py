# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A run that was stopped and resumed equals one that was not, bit by bit."""

from functools import cache

import numpy as np
import pytest

from tests.distributed.jobs import Outcome
from tests.distributed.pool import Pool

PIPELINE = "--pipeline-model-parallel-size 2"
SCHEDULES = {
    "2bw": (2, f"{PIPELINE} --pipeline-schedule 2bw"),
    "1f1b": (2, PIPELINE),
    "oracle": (1, "--gradient-delay 1"),
}
OPTIMIZERS = ("adam", "muon")
EF = "--staleness-correction error-feedback"


def train(pool: Pool, arguments: str, ranks: int) -> list[Outcome]:
    return pool.run("tests.distributed.jobs:train", arguments.split(), ranks=ranks)


def stop_and_go(pool: Pool, recipe: str, ranks: int, folder, *stops: int) -> list[list[Outcome]]:
    """Run to each of `stops` and then to the end, every part in a run of its own."""
    files = f"--save {folder} --load {folder}"
    parts = [train(pool, f"{recipe} {files} --exit-interval {stop} --save-interval {stop}", ranks) for stop in stops]
    return [*parts, train(pool, f"{recipe} {files} --save-interval 100", ranks)]


def assert_continues(parts: list[list[Outcome]], whole: list[Outcome]) -> None:
    """The parts of a run, one after the other, are the whole run bit by bit."""
    for rank, expected in enumerate(whole):
        outcomes = [part[rank] for part in parts]
        for name in ("losses", "grad_norms", "learning_rates", "skipped"):
            assert sum((getattr(outcome, name) for outcome in outcomes), []) == getattr(expected, name), name
        for name, value in expected.weights.items():
            np.testing.assert_array_equal(outcomes[-1].weights[name], value, err_msg=name)


@pytest.fixture(scope="module")
def whole(pool: Pool):
    """Runs that were not stopped, each made once."""

    @cache
    def run(arguments: str, ranks: int) -> list[Outcome]:
        return train(pool, arguments, ranks)

    return run


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("schedule", "correction"), [("2bw", ""), ("2bw", EF), ("1f1b", ""), ("oracle", ""), ("oracle", EF)]
)
def test_resume_is_bit_exact(pool, whole, tmp_path, schedule, correction, optimizer):
    ranks, layout = SCHEDULES[schedule]
    recipe = f"--optimizer {optimizer} {correction} {layout}"
    assert_continues(stop_and_go(pool, recipe, ranks, tmp_path, 3), whole(recipe, ranks))
