# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Evaluations on every layout, of several sets, alone, and cut short."""

from pathlib import Path

import pytest

from megatron_async.files import json_line, read_json_lines
from tests.distributed.jobs import BASE
from tests.distributed.test_resume import PP2_2BW, resume, train

LAYOUTS = {
    "alone": (1, ""),
    "PP2": (2, "--pipeline-model-parallel-size 2 --pipeline-schedule 2bw"),
    "TP2 x DP2": (4, "--tensor-model-parallel-size 2"),
}


def rows(file: Path, key: str) -> list[tuple[int, float]]:
    return [(row["iteration"], row[key]) for row in read_json_lines(file) if key in row]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> tuple[str, str, str]:
    """Three small sets of random documents; the second has five sequences."""
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    folder, random = tmp_path_factory.mktemp("sets"), np.random.default_rng(3)
    prefixes = []
    for name, documents in (("train", 60), ("small", 5), ("other", 12)):
        prefixes.append(str(folder / name))
        builder = IndexedDatasetBuilder(f"{prefixes[-1]}.bin", dtype=np.int32)
        for _ in range(documents):
            builder.add_document(torch.tensor(random.integers(0, 60, 17)), [17])
        builder.finalize(f"{prefixes[-1]}.idx")
    return tuple(prefixes)


def data(corpora, *validation: str) -> str:
    return f"--train-data-path {corpora[0]} --valid-data-path {' '.join(validation)} --test-data-path {corpora[2]}"


@pytest.mark.parametrize("layout", ["PP2", "TP2 x DP2"])
def test_whole_and_several_sets_are_those_of_one_process(pool, corpora, tmp_path, layout):
    """Each sample once, whatever the batch; five sequences do not fill a batch of eight."""
    sets = f"{data(corpora, *corpora[1:])} --full-validation --multiple-validation-sets --validation-set-names a b"
    common = f"{sets} --eval-iters 1 --eval-interval 2 --train-iters 2 --lr-warmup-iters 0 --optimizer adam"
    values = {}
    for name, batches in (("alone", ""), (layout, "--eval-global-batch-size 8 --eval-micro-batch-size 2")):
        ranks, split = LAYOUTS[name]
        file = tmp_path / f"{ranks}.jsonl"
        train(pool, f"{common} {split} {batches} --metrics-file {file}".replace("--pipeline-schedule 2bw", ""), ranks)
        values[name] = [rows(file, key) for key in ("valid_loss-a", "valid_loss-b", "test_loss")]
        assert [len(found) for found in values[name]] == [1, 1, 1]
    for (one,), (other,) in zip(*values.values(), strict=True):
        assert other == (2, pytest.approx(one[1], rel=1e-5))
    assert values[layout][0] != values[layout][1]


@pytest.mark.parametrize("layout", ["alone", "PP2"])
def test_an_evaluation_alone_is_that_of_the_training_run(pool, tmp_path, layout):
    """It needs no optimizer and adds to the metrics file without touching what is there."""
    ranks, split = LAYOUTS["PP2"]
    file = tmp_path / "metrics.jsonl"
    files = f"--save {tmp_path} --save-interval 2 --metrics-file {file}"
    train(pool, f"{split} --optimizer adam --eval-iters 2 --eval-interval 2 {files}", ranks)
    before = read_json_lines(file)
    ranks, split = LAYOUTS[layout]
    recipe = f"{split} --optimizer adam --eval-iters 2 --load {tmp_path} --ckpt-step 2 --skip-train"
    arguments = [*BASE, *f"{recipe} --metrics-file {file}".split()]
    (status, message), *_ = pool.run("tests.distributed.jobs:command", arguments, ranks=ranks, timeout=300)
    assert status == 0, message
    after = read_json_lines(file)
    assert after[: len(before)] == before
    (valid, test) = after[len(before) :]
    assert valid == {"iteration": 2, "valid_loss": pytest.approx(rows(file, "valid_loss")[0][1], rel=1e-6)}
    assert test["iteration"] == 2 and 0 < test["test_loss"] < 10


def test_a_complete_run_that_is_started_again_adds_nothing(pool, tmp_path):
    """As after a kill in the evaluation of the test set, which follows the last checkpoint."""
    file = tmp_path / "metrics.jsonl"
    saved = f"--save {tmp_path} --load {tmp_path} --save-interval 2 --metrics-file {file}"
    recipe = f"{PP2_2BW} --optimizer adam --eval-iters 1 --eval-interval 2 --train-iters 2 --lr-warmup-iters 0 {saved}"
    train(pool, recipe, 2)
    before = read_json_lines(file)
    assert "test_loss" in before[-1]
    for there in (before, before[:-1]):
        file.write_text("".join(map(json_line, there)))
        train(pool, recipe, 2)
        assert read_json_lines(file) == before


def test_a_late_start_of_evaluations(pool, tmp_path):
    file = tmp_path / "metrics.jsonl"
    evaluations = "--eval-interval 2 --eval-iters 1 --start-eval-at-iter 5"
    train(pool, f"--optimizer adam {evaluations} --metrics-file {file}", 1)
    assert [iteration for iteration, _ in rows(file, "valid_loss")] == [6]


def test_a_request_to_end_cuts_an_evaluation_short(pool, tmp_path):
    """The evaluation is given up, the model trains on with dropout, the resumed run is the undisturbed one."""
    recipe = f"--optimizer adam {PP2_2BW} --hidden-dropout 0.1 --eval-interval 3 --eval-iters 4"
    whole = train(pool, recipe, 2)
    arguments = f"{recipe} --save {tmp_path} --save-interval 100".split()
    first = pool.run("tests.distributed.resume_jobs:train_signaled", arguments, 0, "evaluation", ranks=2)
    assert [outcome.status for outcome in first] == [85, 85] and not first[-1].validation
    second = resume(pool, tmp_path, 3, recipe, 2)
    assert second[-1].losses == whole[-1].losses[3:]


def test_a_longer_run_reads_the_same_samples(pool, corpora, tmp_path):
    """63 sequences: 7 batches of 8 are within one pass, 12 are two, whose order Megatron draws anew."""
    recipe = f"{data(corpora, corpora[1])} {PP2_2BW} --optimizer adam --lr-decay-iters 20 --eval-iters 0"
    whole = train(pool, f"{recipe} --train-iters 7", 2)
    saved = f"--save {tmp_path} --load {tmp_path} --save-interval 3"
    train(pool, f"{recipe} --train-iters 3 {saved}", 2)
    longer = train(pool, f"{recipe} --train-iters 7 {saved}", 2)
    assert longer[-1].losses == whole[-1].losses[3:]
    too_long = f"{recipe} --train-iters 12 --load {tmp_path} --ckpt-step 3"
    for message in pool.run("tests.distributed.resume_jobs:fault_of", too_long.split(), ranks=2, timeout=300):
        assert "--train-iters 12 needs 96 training samples" in message and "ends after 63" in message
    other = train(pool, f"{too_long} --data-order-samples 96", 2)
    assert len(other[-1].losses) == 9


def test_a_first_loss_that_is_not_finite_ends_every_rank(pool):
    for layout in ("", "--pipeline-schedule 2bw"):
        arguments = f"--pipeline-model-parallel-size 2 {layout} --optimizer adam --train-iters 50".split()
        for said in pool.run("tests.distributed.resume_jobs:train_with_nan", arguments, 0, ranks=2):
            assert "the loss of the first batch is not finite" in said
