# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The experts' balance in the metrics file, and the routers' biases, are those of one process on every layout."""

import json
from functools import cache

import numpy as np
import pytest

from benchmarks.processes import Pool
from tests.distributed.moe_jobs import Routing

RATE, SEQUENCE, BATCH, TOPK, LAYERS, EXPERTS = 0.001, 16, 8, 2, (2, 3, 4), 8
# The first layer is dense, so that the layers with experts have other numbers on every stage.
MODEL = (
    f"--num-experts {EXPERTS} --moe-ffn-hidden-size 16 --moe-router-topk {TOPK} --moe-router-score-function sigmoid "
    f"--moe-router-enable-expert-bias --moe-router-bias-update-rate {RATE} --moe-aux-loss-coeff 0.02 "
    "--moe-z-loss-coeff 0.01 --moe-layer-freq [0,1,1,1] --moe-token-dispatcher-type alltoall --optimizer adam "
    f"--clip-grad 0.5 --untie-embeddings-and-output-weights --global-batch-size {BATCH} --train-iters 5"
)
PP2 = "--pipeline-model-parallel-size 2"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
EXPERTS_AGAIN = "--recompute-granularity selective --recompute-modules moe"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
EP2 = "--expert-model-parallel-size 2"

# Ranks, arguments, the delay of the one-process run.
LAYOUTS = {
    "1f1b PP2": (2, PP2, ""),
    "1f1b TP2": (2, TP2, ""),
    "1f1b EP2": (2, EP2, ""),
    "1f1b DP2": (2, "", ""),
    "2bw PP2": (2, f"{PP2} --pipeline-schedule 2bw", "1"),
    "2bw PP2, layers recomputed": (2, f"{PP2} {FULL} --pipeline-schedule 2bw", "1"),
    "2bw PP2, experts recomputed": (2, f"{PP2} {EXPERTS_AGAIN} --pipeline-schedule 2bw", "1"),
    "2bw PP2, micro-batches of 2": (2, f"{PP2} --pipeline-schedule 2bw --micro-batch-size 2", "1"),
    "2bw PP2, synchronous start": (2, f"{PP2} --pipeline-schedule 2bw --sync-start-iters 2", "1 --sync-start-iters 2"),
    "2bw PP2xEP2": (4, f"{PP2} {EP2} --pipeline-schedule 2bw", "1"),
    "2bw PP2xTP2": (4, f"{PP2} {TP2} --pipeline-schedule 2bw", "1"),
    "wpipe PP2": (2, f"{PP2} --pipeline-schedule wpipe", "wpipe"),
}


def train(pool: Pool, arguments: str, ranks: int, bad_batch: int = -1) -> list[Routing]:
    return pool.run("tests.distributed.moe_jobs:train", f"{MODEL} {arguments}".split(), bad_batch, ranks=ranks)


@pytest.fixture(scope="module")
def reference(pool: Pool):
    return cache(lambda arguments: train(pool, arguments, 1)[0])


def one_process(layout: str) -> str:
    _, arguments, delay = LAYOUTS[layout]
    size = "--micro-batch-size 2" if "--micro-batch-size 2" in arguments else ""
    return f"{size} --gradient-delay {delay}" if delay else size


@pytest.mark.parametrize("layout", LAYOUTS)
def test_balance_and_biases_are_those_of_one_process(pool, reference, layout):
    ranks, arguments, _ = LAYOUTS[layout]
    expected = reference(one_process(layout))
    outcomes = train(pool, arguments, ranks)
    for outcome in outcomes:
        # Every token counts once, wherever it is and however often its layer is computed.
        assert [counts.sum(axis=1).tolist() for counts in outcome.counts] == [[SEQUENCE * BATCH * TOPK] * 3] * 5
        np.testing.assert_array_equal(outcome.counts, expected.counts)
        for biases, right in zip(outcome.biases, expected.biases, strict=True):
            for layer, bias in biases.items():
                np.testing.assert_allclose(bias, right[layer], atol=1e-7)
    assert {layer for outcome in outcomes for layer in outcome.biases[0]} == set(LAYERS)
    assert_same_rows(outcomes[-1].rows, expected.rows)


def assert_same_rows(rows, expected):
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5]
    for row, right in zip(rows, expected, strict=True):
        assert row["moe_layers"].keys() == {"2", "3", "4"}
        for numbers, correct in [
            (row, right),
            *((row["moe_layers"][layer], right["moe_layers"][layer]) for layer in "234"),
        ]:
            for name in ("load_balancing_loss", "z_loss"):
                assert numbers[name] == pytest.approx(correct[name], rel=2e-5)
            for name in ("expert_imbalance", "idle_experts"):
                assert numbers[name] == correct[name]


def test_one_process_says_what_the_definitions_say(reference):
    """The biases move by the rate, up where an expert got less than the mean, once for each batch."""
    run = reference("--gradient-delay 1")
    before = dict.fromkeys(LAYERS, np.zeros(EXPERTS, np.float32))
    for counts, biases, row in zip(run.counts, run.biases, run.rows, strict=True):
        for tokens, layer in zip(counts, LAYERS, strict=True):
            step = np.sign(tokens.mean() - tokens) * RATE
            np.testing.assert_allclose(biases[layer] - before[layer], step, atol=1e-7)
            numbers = row["moe_layers"][str(layer)]
            assert numbers["expert_imbalance"] == pytest.approx(tokens.max() / tokens.mean())
            assert numbers["idle_experts"] == (tokens == 0).sum()
        before = biases
        by_layer = [numbers["load_balancing_loss"] for numbers in row["moe_layers"].values()]
        assert row["load_balancing_loss"] == pytest.approx(sum(by_layer) / 3)
        assert 0.9 < row["load_balancing_loss"] < EXPERTS
        # Of small logits: the square of the logarithm of the number of experts.
        assert row["z_loss"] == pytest.approx(np.log(EXPERTS) ** 2, rel=0.2)


SKIPS = {
    "2bw": (2, f"{PP2} --pipeline-schedule 2bw"),
    "2bw, at once": (2, f"{PP2} --pipeline-schedule 2bw --update-launch at-once"),
    "wpipe": (2, f"{PP2} --pipeline-schedule wpipe"),
    "1f1b": (2, PP2),
    "one process": (1, "--gradient-delay 1"),
    "one process, wpipe": (1, "--gradient-delay wpipe"),
}


@pytest.mark.parametrize("schedule", SKIPS)
def test_biases_stay_where_an_update_is_skipped(pool, schedule):
    ranks, arguments = SKIPS[schedule]
    for outcome in train(pool, arguments, ranks, bad_batch=2):
        assert outcome.skipped == [False, False, True, False, False]
        for layer, bias in outcome.biases[2].items():
            np.testing.assert_array_equal(bias, outcome.biases[1][layer])
            assert np.abs(outcome.biases[3][layer] - bias).max() == pytest.approx(RATE, rel=1e-3)


@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
def test_evaluation_is_not_counted(pool, schedule):
    ranks, arguments = SKIPS[schedule]
    never, often = (train(pool, f"{arguments} {extra}", ranks) for extra in ("", "--eval-interval 2 --eval-iters 2"))
    for one, other in zip(never, often, strict=True):
        np.testing.assert_array_equal(one.counts, other.counts)
        np.testing.assert_equal(one.biases, other.biases)


def test_the_file_holds_what_the_log_holds(pool, tmp_path):
    path = tmp_path / "metrics.jsonl"
    (*_, last) = train(pool, f"{PP2} --pipeline-schedule 2bw --metrics-file {path}", 2, bad_batch=2)
    rows = [json.loads(line) for line in path.read_text().splitlines()][1:]
    assert len(rows) == 5
    assert [row["moe_layers"] for row in rows] == [row["moe_layers"] for row in last.rows]
    assert all("load_balancing_loss" in row and "z_loss" in row and row["expert_imbalance"] >= 1 for row in rows)
