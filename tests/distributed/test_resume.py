# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A run that was stopped and resumed equals one that was not, bit by bit."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.processes import Pool
from megatron_async.files import read_json_lines
from megatron_async.optim.registry import names
from tests.distributed.jobs import Outcome
from tests.distributed.matrix import MODELS, UNTIED
from tests.distributed.resume_jobs import PIECES
from tests.distributed.test_optimizers import CORRECTIONS, SPECIAL
from tests.distributed.test_parity import ATOL, RTOL

PP2 = "--pipeline-model-parallel-size 2"
SCHEDULES = {
    "2bw": (2, f"{PP2} --pipeline-schedule 2bw"),
    "1f1b": (2, PP2),
    "oracle": (1, "--gradient-delay 1"),
}
EF = "--staleness-correction error-feedback"
BATCHES = 6


def train(pool: Pool, arguments: str, ranks: int) -> list[Outcome]:
    return pool.run("tests.distributed.jobs:train", arguments.split(), ranks=ranks, timeout=600)


def resume(pool: Pool, folder: Path, step: int, recipe: str, ranks: int) -> list[Outcome]:
    return train(pool, f"{recipe} --load {folder} --ckpt-step {step}", ranks)


def assert_continues(resumed: list[Outcome], whole: list[Outcome], step: int, *, experts: bool = False) -> None:
    """The resumed run is the rest of the whole one, bit by bit."""
    for part, expected in zip(resumed, whole, strict=True):
        for name in ("losses", "grad_norms", "learning_rates", "skipped"):
            assert getattr(part, name) == getattr(expected, name)[step:], name
        for name, value in expected.weights.items():
            np.testing.assert_array_equal(part.weights[name], value, err_msg=name)
        # Megatron saves no state of its generator for experts' initial weights by expert rank; nothing draws from it.
        differing = {name for name, state in expected.random_states.items() if part.random_states[name] != state}
        assert differing <= ({"expert-parallel-rng"} if experts else set())


def assert_close(resumed: list[Outcome], whole: list[Outcome], step: int) -> None:
    """Losses and weights of a run on another layout, to reduction order; weights cut among ranks by their losses."""
    losses = [next(outcome.losses for outcome in run if outcome.losses) for run in (resumed, whole)]
    np.testing.assert_allclose(losses[0], losses[1][step:], rtol=RTOL, atol=ATOL)
    merged = [{name: value for outcome in run for name, value in outcome.weights.items()} for run in (resumed, whole)]
    assert merged[0].keys() == merged[1].keys()
    for name, value in merged[1].items():
        if merged[0][name].shape != value.shape:
            continue
        np.testing.assert_allclose(merged[0][name], value, rtol=RTOL, atol=10 * ATOL, err_msg=name)


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
@pytest.mark.parametrize(("schedule", "correction"), [("2bw", ""), ("1f1b", ""), ("oracle", ""), ("oracle", EF)])
def test_resume_is_bit_exact(pool, saved, schedule, correction, optimizer):
    ranks, layout = SCHEDULES[schedule]
    recipe = f"--optimizer {optimizer} {correction} {layout}"
    folder, whole = saved(recipe, ranks)
    assert_continues(resume(pool, folder, 3, recipe, ranks), whole, 3)


@pytest.mark.parametrize("optimizer", names())
def test_every_optimizer(pool, saved, optimizer):
    """Preconditioners and momenta have shapes of their own; on the same layout, and in one process."""
    _resume_here_and_in_one_process(pool, saved, f"--optimizer {optimizer} {SPECIAL.get(optimizer, '')} {EF}")


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_every_correction(pool, saved, correction):
    _resume_here_and_in_one_process(pool, saved, CORRECTIONS[correction])


def _resume_here_and_in_one_process(pool, saved, recipe):
    folder, whole = saved(f"{recipe} {SCHEDULES['2bw'][1]}", 2)
    assert_continues(resume(pool, folder, 3, f"{recipe} {SCHEDULES['2bw'][1]}", 2), whole, 3)
    assert_close(resume(pool, folder, 3, f"{recipe} {SCHEDULES['oracle'][1]}", 1), whole, 3)


PP2_2BW = f"{PP2} --pipeline-schedule 2bw"
MOE = MODELS["moe"]
SHARDED = {
    "bf16": (4, f"--optimizer muon --bf16 {PP2_2BW}"),
    "distributed": (4, f"--optimizer adam --use-distributed-optimizer {PP2_2BW}"),
    "distributed bf16": (4, f"--optimizer adam --use-distributed-optimizer --bf16 {PP2_2BW}"),
    "layer-wise": (4, f"--optimizer muon --use-distributed-optimizer {PP2_2BW}"),
    "experts": (4, f"--optimizer adam {MOE} --expert-model-parallel-size 2 {PP2_2BW}"),
    "wpipe": (2, f"--optimizer adam {PP2} --pipeline-schedule wpipe {UNTIED}"),
    "wpipe, chains of optimizers": (2, f"--optimizer muon {PP2} --pipeline-schedule wpipe {UNTIED}"),
    "wpipe, layer-wise": (
        4,
        f"--optimizer muon --use-distributed-optimizer {PP2} --pipeline-schedule wpipe {UNTIED}",
    ),
    "pipedream": (2, f"--optimizer adam {PP2} --pipeline-schedule pipedream --global-batch-size 1 {UNTIED}"),
}


@pytest.mark.parametrize("kind", SHARDED)
def test_masters_versions_and_sharded_state(pool, saved, kind):
    ranks, recipe = SHARDED[kind]
    folder, whole = saved(f"{recipe} {EF}", ranks)
    assert_continues(resume(pool, folder, 3, f"{recipe} {EF}", ranks), whole, 3, experts=kind == "experts")


@pytest.mark.parametrize("precision", ["", "--bf16"])
def test_distributed_optimizer_under_1f1b(pool, saved, precision):
    recipe = f"--optimizer adam --use-distributed-optimizer {precision}"
    folder, whole = saved(recipe, 2)
    assert_continues(resume(pool, folder, 3, recipe, 2), whole, 3)


EVERYTHING = f"--optimizer adam {EF} {SCHEDULES['2bw'][1]} --hidden-dropout 0.1 --attention-dropout 0.1"


@pytest.mark.parametrize("step", [1, 2, 5])
def test_everything_switched_on(pool, saved, step):
    """Dropout, error feedback; in warm-up and near the end."""
    folder, whole = saved(EVERYTHING, 2, 1)
    assert_continues(resume(pool, folder, step, EVERYTHING, 2), whole, step)


@pytest.mark.parametrize("piece", PIECES)
def test_no_piece_of_state_can_be_left_out(pool, saved, piece):
    """The comparison above notices each piece: without it the weights come out different."""
    folder, whole = saved(EVERYTHING, 2, 1)
    arguments = f"{EVERYTHING} --load {folder} --ckpt-step 3".split()
    spoiled = pool.run("tests.distributed.resume_jobs:resume_without", arguments, piece, ranks=2)
    assert any(not np.array_equal(spoiled[0].weights[name], value) for name, value in whole[0].weights.items())


def test_saving_changes_nothing(pool, saved):
    _, whole = saved(EVERYTHING, 2, 1)
    assert_continues(train(pool, EVERYTHING, 2), whole, 0)


def test_resumed_again_and_again(pool, saved, tmp_path):
    """Three resumes in a row, with evaluations; the metrics file has no gap and no double."""
    evaluate = "--eval-interval 2 --eval-iters 1"
    whole_file, file = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    whole = train(pool, f"{EVERYTHING} {evaluate} --metrics-file {whole_file}", 2)
    files = f"--save {tmp_path} --load {tmp_path} --save-interval 1 --metrics-file {file}"
    for stop in (1, 3, 5, 100):
        last = train(pool, f"{EVERYTHING} {evaluate} {files} --exit-interval {stop}", 2)
    assert_continues(last, whole, 5)
    assert rows(file) == rows(whole_file)
    assert [row["iteration"] for row in rows(file) if "lm_loss" in row] == list(range(1, BATCHES + 1))


def rows(file: Path) -> list[dict[str, float]]:
    """Rows of a metrics file without times and settings."""
    timing = {"iteration_ms", "tokens_per_s", "tflops_per_device", "bubble_share"}
    return [{key: row[key] for key in row if key not in timing} for row in read_json_lines(file) if "config" not in row]
