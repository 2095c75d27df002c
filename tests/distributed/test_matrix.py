# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Cells of the parity matrix that together cover every schedule, layout, model, precision and sharding."""

from functools import cache

import pytest

from benchmarks.processes import Pool
from tests.distributed.jobs import Outcome
from tests.distributed.matrix import (
    LAYOUTS,
    MODELS,
    SHARDING,
    TOLERANCE,
    TRAIN,
    UNTIED,
    Cell,
    cells,
    difference,
    measure,
)

NAMES = (
    "1f1b-TP2-dense-fp32-plain-adam",
    "1f1b-EP2-moe-fp32-plain-adam",
    "1f1b-DP2-dense-fp32-sharded-adam",
    "2bw-PP2-dense-bf16-plain-muon",
    "2bw-PP4-moe-fp32-plain-adam",
    "2bw-PP2xTP2-moe-fp32-plain-muon",
    "2bw-PP2xDP2-dense-fp32-sharded-adam",
    "2bw-PP2xDP2-moe-fp32-sharded-muon",
    "2bw-PP2xDP2-dense-bf16-sharded-adam",
    "2bw-PP2xEP2-moe-fp32-plain-muon",
    "2bw-eager-PP4-dense-fp32-plain-muon",
    "2bw-eager-PP2xDP2-moe-fp32-sharded-muon",
    "wpipe-PP2-moe-fp32-plain-muon",
    "wpipe-PP2xTP2-dense-fp32-plain-muon",
    "wpipe-PP2xTP2-moe-bf16-plain-muon",
    "wpipe-PP2xDP2-dense-fp32-sharded-muon",
    "2bw-PP2xTP2-hybrid-fp32-plain-muon",
    "2bw-PP2xTP2-latent-fp32-plain-muon",
    "wpipe-PP2-hybrid-fp32-plain-muon",
    "pipedream-PP4-dense-fp32-plain-adam",
    "pipedream-PP2xDP2-dense-fp32-plain-adam",
)
CELLS = {cell.name: cell for cell in cells()}


@pytest.fixture(scope="module")
def reference(pool: Pool):
    return cache(lambda arguments, ranks=1: pool.run(TRAIN, arguments.split(), ranks=ranks))


@pytest.mark.parametrize("name", NAMES)
def test_cell_equals_the_oracle(pool, reference, name):
    cell = CELLS[name]
    assert not cell.excluded

    def run(arguments: str, ranks: int) -> list[Outcome]:
        return pool.run(TRAIN, arguments.split(), ranks=ranks, timeout=300)

    assert measure(cell, run, reference) <= cell.tolerance


@pytest.mark.parametrize("layout", ["TP2", "DP2", "EP2"])
def test_oracle_of_wpipe_on_two_ranks(pool, reference, layout):
    """Each half of the layers is clipped by its own norm, which is summed over the ranks."""
    recipe = f"{MODELS['moe']} --optimizer muon --clip-grad 0.5 {UNTIED} --gradient-delay wpipe"
    alone = f"{LAYOUTS[layout][1]} {SHARDING['sharded' if layout == 'DP2' else 'plain']}"
    ranks = pool.run(TRAIN, f"{recipe} {alone}".split(), ranks=2)
    assert difference(ranks, reference(recipe)[0], norms=True) <= TOLERANCE["fp32"]


@pytest.mark.parametrize("precision", TOLERANCE)
def test_a_wrong_delay_would_be_seen(reference, precision):
    """The tolerances tell a delayed run from a synchronous one, with a wide margin."""
    cell = Cell("2bw", "PP2", "dense", precision, "plain", "muon")
    (right,) = reference(cell.reference)
    (wrong,) = reference(cell.reference.replace("--gradient-delay 1", "--gradient-delay 2"))
    assert difference([wrong], right, norms=True) > 5 * TOLERANCE[precision]


# Arguments of both runs, and of the pipeline alone.
EXTRAS = {
    "full recomputation": ("", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    "selective recomputation": ("", "--recompute-granularity selective"),
    "loss per token": ("--calculate-per-token-loss", ""),
    "uneven layers": ("", "--decoder-first-pipeline-num-layers 3"),
    "reduction in bf16": ("--bf16 --grad-reduce-in-bf16", ""),
}


@pytest.mark.parametrize("extra", EXTRAS)
def test_feature_under_2bw(pool, reference, extra):
    recipe = "--optimizer adam --untie-embeddings-and-output-weights"
    common, alone = EXTRAS[extra]
    (expected,) = reference(f"{recipe} {common} --gradient-delay 1")
    arguments = f"{recipe} {common} {alone} --pipeline-model-parallel-size 2 --pipeline-schedule 2bw"
    pipeline = pool.run(TRAIN, arguments.split(), ranks=2)
    assert difference(pipeline, expected, norms=True) <= TOLERANCE["bf16" if "bf16" in extra else "fp32"]


def test_three_layers_on_two_stages_of_pipedream(pool, reference):
    """The delay oracle gives the remainder to the first stages, here two layers to stage 0."""
    recipe = f"--optimizer adam --num-layers 3 --global-batch-size 1 --clip-grad 0.5 {UNTIED}"
    split = "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 2"
    pipeline = pool.run(TRAIN, f"{recipe} {split} --pipeline-schedule pipedream".split(), ranks=2)
    (expected,) = reference(f"{recipe} --gradient-delay pipedream:2")
    assert difference(pipeline, expected, norms=False) <= TOLERANCE["fp32"]


def test_recomputation_with_biased_routers(pool, reference):
    """Routers count while layers are recomputed, in the backward pass, when the next batch is under way."""
    cell = Cell("2bw", "PP2", "moe", "fp32", "plain", "adam")
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    pipeline = pool.run(TRAIN, f"{cell.pipeline} {recompute}".split(), ranks=2)
    assert difference(pipeline, reference(cell.reference)[0], norms=True) <= TOLERANCE["fp32"]


def test_copies_of_a_tied_embedding_stay_bit_equal(pool):
    arguments = "--optimizer muon --pipeline-model-parallel-size 2 --pipeline-schedule 2bw"
    first, last = pool.run(TRAIN, arguments.split(), ranks=2)
    name = "embedding.word_embeddings.weight"
    assert (first.weights[name] == last.weights[name]).all()


@pytest.mark.parametrize("mode", ["", "--calculate-per-token-loss"])
def test_micro_batches_with_different_numbers_of_tokens(pool, mode):
    """By default micro-batches weigh the same; with a loss per token, tokens do, however the batch is cut."""
    recipe = f"--optimizer adam --clip-grad 0.5 {mode}"
    pipeline = f"{recipe} --pipeline-model-parallel-size 2 --pipeline-schedule 2bw"
    job = "tests.distributed.jobs:train_masked"
    (expected,) = pool.run(job, f"{recipe} --gradient-delay 1".split(), ranks=1)
    assert difference(pool.run(job, pipeline.split(), ranks=2), expected, norms=True) <= TOLERANCE["fp32"]
    cut = pool.run(job, f"{pipeline} --micro-batch-size 2".split(), ranks=2)
    if mode:
        assert difference(cut, expected, norms=True) <= TOLERANCE["fp32"]
    else:
        assert difference(cut, expected, norms=True) > 10 * TOLERANCE["fp32"]
