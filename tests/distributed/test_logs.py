# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""What Megatron logs on request: norms, zeros, the world size, progress.txt."""

import numpy as np
import pytest

from megatron_async.files import read_json_lines
from tests.distributed.matrix import UNTIED
from tests.distributed.test_resume import PP2_2BW, train

LOGS = "--log-params-norm --log-num-zeros-in-grad --log-world-size-to-tensorboard"


def test_totals_are_those_of_one_process(pool, tmp_path):
    """Over pipeline, tensor and data parallelism, shards and tied embeddings; against the weights themselves."""
    for model, splits in {
        "--optimizer adam": {4: f"{PP2_2BW} --use-distributed-optimizer", 2: "--tensor-model-parallel-size 2"},
        f"--optimizer muon {UNTIED}": {2: "--pipeline-model-parallel-size 2 --pipeline-schedule wpipe"},
    }.items():
        rows = {}
        for ranks, split in splits.items():
            oracle = "--gradient-delay wpipe" if "wpipe" in split else "--gradient-delay 1" if "2bw" in split else ""
            for number, layout in ((1, oracle), (ranks, split)):
                file = tmp_path / f"{number}.jsonl"
                file.unlink(missing_ok=True)
                outcome = train(pool, f"{model} {layout} {LOGS} --train-iters 3 --metrics-file {file}", number)
                rows[number] = [row for row in read_json_lines(file) if "lm_loss" in row]
                if number == 1:
                    weights = np.concatenate([weight.ravel() for weight in outcome[0].weights.values()])
                    assert rows[1][-1]["params_norm"] == pytest.approx(np.linalg.norm(weights), rel=1e-6)
            for one, other in zip(rows[1], rows[ranks], strict=True):
                assert other["params_norm"] == pytest.approx(one["params_norm"], rel=1e-5), (model, split)
                assert other["num_zeros"] == one["num_zeros"] > 0, (model, split)
                assert (one["world_size"], other["world_size"]) == (1, ranks)


def test_progress_holds_starts_and_saves(pool, tmp_path):
    train(pool, f"--optimizer adam {PP2_2BW} --save {tmp_path} --save-interval 4 --log-progress", 2)
    lines = (tmp_path / "progress.txt").read_text().splitlines()
    assert ["Starting job" in lines[0], *("Saved checkpoint" in line for line in lines[1:])] == [True] * 3
    assert [f"Iteration: {number}\t" in line for number, line in zip((4, 6), lines[1:], strict=True)] == [True, True]
