# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""What Megatron logs on request: norms, zeros, the world size, progress.txt."""

import json

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


@pytest.mark.parametrize("schedule", ["--pipeline-schedule 2bw", ""])
def test_timers_are_the_slowest_rank_of_the_trace(pool, tmp_path, schedule):
    """`--log-timers-to-tensorboard`: Megatron's names, seconds a batch, the mean of each --log-interval."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(
        pool,
        f"--optimizer adam --pipeline-model-parallel-size 2 {schedule} --train-iters 4 --log-interval 2 "
        f"--log-timers-to-tensorboard --tensorboard-dir {tmp_path}/board --trace-file {tmp_path}/trace.json "
        f"--metrics-file {tmp_path}/metrics.jsonl",
        2,
    )
    spans = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    for kind, name in {"F": "forward-compute-time", "B": "backward-compute-time", "U": "optimizer-time"}.items():
        known = [[known_by_update(spans, rank, kind, iteration) for iteration in (0, 2, 4)] for rank in (0, 1)]
        means = np.diff(known, axis=1).max(axis=0) / 2
        assert [event.step for event in board.Scalars(name)] == [2, 4]
        assert [event.value for event in board.Scalars(name)] == pytest.approx(means, rel=1e-5), name
    rows = [row for row in read_json_lines(tmp_path / "metrics.jsonl") if "lm_loss" in row]
    for name, values in {
        "iteration-time": [row["iteration_ms"] / 1000 for row in rows],
        "throughput": [row["tflops_per_device"] for row in rows],
    }.items():
        assert [event.value for event in board.Scalars(name)] == pytest.approx(values, rel=1e-5)


def known_by_update(spans, rank, kind, iteration):
    """Seconds of a rank's spans of one kind up to the end of an iteration's update, which is when they are read."""
    own = [span for span in spans if span["pid"] == rank]
    updates = (span for span in own if span["args"]["kind"] == "U" and span["args"]["batch"] == iteration - 1)
    end = next((span["ts"] + span["dur"] for span in updates), 0.0)
    return sum(span["dur"] for span in own if span["args"]["kind"] == kind and span["ts"] < end) / 1e6
