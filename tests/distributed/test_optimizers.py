# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Every optimizer and every correction under a real schedule against the one-process oracle."""

import json
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from megatron_async.optim.algorithms.catalogue import names
from tests.distributed.jobs import Outcome
from tests.distributed.matrix import difference
from tests.distributed.pool import Pool

TOLERANCE = 2e-5
PIPELINE = "--pipeline-model-parallel-size 2 --pipeline-schedule 2bw"
FEEDBACK = "--staleness-correction error-feedback"

# SOAP's basis is free where a gradient has no component, so that rounding errors turn it; without clipping and tied
# weights there are none between the two runs. Lion and Signum move every element by the whole learning rate.
SPECIAL = {
    "soap": "--clip-grad 0 --untie-embeddings-and-output-weights --soap-precondition-frequency 2",
    "lion": "--lr 0.002 --min-lr 0.0002",
    "signum": "--lr 0.002 --min-lr 0.0002",
}


def train(pool: Pool, arguments: str, ranks: int) -> list[Outcome]:
    return pool.run("tests.distributed.jobs:train", arguments.split(), ranks=ranks)


@pytest.fixture(scope="module")
def reference(pool: Pool):
    """One-process runs with a delay of one update, each made once."""

    @cache
    def run(recipe: str) -> Outcome:
        return train(pool, f"{recipe} --gradient-delay 1", 1)[0]

    return run


@pytest.mark.parametrize("correction", ["", FEEDBACK], ids=["plain", "error-feedback"])
@pytest.mark.parametrize("optimizer", names())
def test_every_optimizer_equals_the_oracle(pool, reference, optimizer, correction):
    recipe = f"--optimizer {optimizer} {SPECIAL.get(optimizer, '')} {correction}"
    expected = reference(recipe)
    assert difference(train(pool, f"{recipe} {PIPELINE}", 2), expected, norms=True) <= TOLERANCE
    assert expected.losses[-1] < expected.losses[0]


CORRECTIONS = {
    "weight-prediction": "--optimizer normuon --staleness-correction weight-prediction --correction-strength 0.5",
    "weight-prediction-updated": "--optimizer adam --staleness-correction weight-prediction-updated",
    "dc-asgd": "--optimizer sgd --staleness-correction dc-asgd --correction-strength 1e4",
    "gradient-error-feedback": "--optimizer muon --staleness-correction gradient-error-feedback",
}


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_every_correction_equals_the_oracle(pool, reference, correction):
    """Evaluation on the way, at the accumulator under weight prediction, and a synchronous start and end."""
    recipe = f"{CORRECTIONS[correction]} --eval-interval 3 --eval-iters 2 --sync-start-iters 1 --sync-cooldown-iters 1"
    expected, pipeline = reference(recipe), train(pool, f"{recipe} {PIPELINE}", 2)
    assert difference(pipeline, expected, norms=True) <= TOLERANCE
    np.testing.assert_allclose(pipeline[-1].validation, expected.validation, rtol=TOLERANCE)


def test_corrections_differ_from_each_other_and_from_none(reference):
    recipe = "--optimizer muon"
    ends = {
        name: reference(f"{recipe} --staleness-correction {name}").losses[-1]
        for name in ("error-feedback", "weight-prediction", "gradient-error-feedback")
    }
    ends["none"] = reference(recipe).losses[-1]
    assert len({round(value, 5) for value in ends.values()}) == len(ends)


GROUPED = "--optimizer normuon --group-query-attention --num-query-groups 2"


@pytest.mark.parametrize("gate", ["", "--attention-output-gate"], ids=["no gate", "gate"])
def test_tensor_parallel_fused_projections(pool, reference, gate):
    recipe = f"{GROUPED} {gate} {FEEDBACK}"
    pipeline = train(pool, f"{recipe} {PIPELINE} --tensor-model-parallel-size 2", 4)
    losses = [outcome.losses for outcome in pipeline if outcome.losses]
    np.testing.assert_allclose(losses[0], reference(recipe).losses, rtol=TOLERANCE)


@pytest.mark.parametrize("optimizer", ["normuon", "mars", "lion"])
def test_layer_wise_distributed_optimizer(pool, reference, optimizer):
    """Each data-parallel rank steps on whole parameters of its own."""
    recipe = f"--optimizer {optimizer} {SPECIAL.get(optimizer, '')} {FEEDBACK}"
    pipeline = train(pool, f"{recipe} {PIPELINE} --use-distributed-optimizer", 4)
    assert difference(pipeline, reference(recipe), norms=True) <= TOLERANCE


def test_several_optimizers_side_by_side(pool, reference):
    recipe = "--optimizer muon --optimizer-for qkv=adamuon --optimizer-for norm=lion --optimizer-for embedding=nadam"
    recipe = f"{recipe} --lr 0.005 --min-lr 0.0005 {FEEDBACK}"
    assert difference(train(pool, f"{recipe} {PIPELINE}", 2), reference(recipe), norms=True) <= TOLERANCE


def test_a_role_that_the_model_does_not_have(pool):
    with pytest.raises(AssertionError, match=r"--optimizer-for router=adam: the model has no parameter of that role"):
        train(pool, f"--optimizer muon --optimizer-for router=adam {PIPELINE}", 2)


@pytest.mark.parametrize("delay", ["pipeline", "oracle"])
def test_a_gradient_that_is_no_number_changes_no_state(pool, delay):
    layout, ranks = (PIPELINE, 2) if delay == "pipeline" else ("--gradient-delay 1", 1)
    recipe = f"--optimizer normuon {FEEDBACK} {layout}"
    answers = pool.run("tests.distributed.optimizer_jobs:train_with_a_bad_gradient", recipe.split(), 3, ranks=ranks)
    for outcome, unchanged in answers:
        assert outcome.skipped == [False, False, False, True, False, False]
        assert unchanged == outcome.skipped
    assert np.isfinite(answers[-1][0].losses[5])


@pytest.mark.parametrize("layout", ["", PIPELINE], ids=["1f1b", "2bw"])
def test_without_a_learning_rate_gradients_stay_the_same(pool, layout):
    """No half of a combined optimizer keeps gradients of earlier batches; the vocabulary is 16 times the width."""
    recipe = f"--optimizer muon --lr 0 --min-lr 0 --vocab-size 511 {layout}".split()
    for norms in pool.run(
        "tests.distributed.optimizer_jobs:gradient_norms_of_one_batch", recipe, ranks=2 if layout else 1
    ):
        np.testing.assert_allclose(norms, norms[0], rtol=1e-6)


ABLATIONS = {
    "head without delay": "--optimizer muon --undelayed-head --untie-embeddings-and-output-weights",
    "delay of the first moment": "--optimizer adam --delay-first-moment-only",
}


@pytest.mark.parametrize("ablation", ABLATIONS)
def test_ablations_are_none_without_a_delay(pool, reference, ablation):
    """With a delay of 0 both are the synchronous run; with a delay of 1 they differ from it and from plain delay."""
    recipe = ABLATIONS[ablation]
    plain = recipe.replace("--undelayed-head", "").replace("--delay-first-moment-only", "")
    synchronous = train(pool, plain, 1)[0]
    ablated = train(pool, f"{recipe} --gradient-delay 0", 1)[0]
    assert difference([ablated], synchronous, norms=True) <= TOLERANCE
    delayed = reference(recipe)
    assert difference([delayed], synchronous, norms=True) > 1e-3
    assert difference([delayed], reference(plain), norms=True) > 1e-3


def test_statistics_of_updates(pool, tmp_path: Path):
    """The same numbers from a pipeline and from one process, which also tells how stale the updates are."""
    rows = {}
    for name, layout, ranks in (("oracle", "--gradient-delay 1", 1), ("pipeline", PIPELINE, 2)):
        file = tmp_path / f"{name}.jsonl"
        recipe = f"--optimizer muon --untie-embeddings-and-output-weights {FEEDBACK} --log-update-statistics 3"
        train(pool, f"{recipe} {layout} --metrics-file {file}", ranks)
        rows[name] = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    for name, lines in rows.items():
        assert ["update_rms" in line for line in lines] == [False, False, True, False, False, True], name
    for oracle, pipeline in zip(rows["oracle"], rows["pipeline"], strict=True):
        if "update_rms" not in oracle:
            continue
        assert oracle["update_rms"].keys() == {"embedding", "head", "norm", "qkv", "matrix"}
        for role, size in oracle["update_rms"].items():
            assert pipeline["update_rms"][role] == pytest.approx(size, rel=1e-4), role
        assert pipeline["correction_rms"] == pytest.approx(oracle["correction_rms"], rel=1e-4)
        assert oracle["correction_rms"] > 0
        assert 0 < oracle["stale_update_cosine"] < 1 and oracle["stale_update_relative_error"] > 0
        assert "stale_update_cosine" not in pipeline


# Arguments, and for each problem a text that names it.
WRONG = {
    "--optimizer adamw": ["'adamw'.*normuon"],
    "--optimizer normuon --normuon-beta2 1.5": ["--normuon-beta2 1.5: allowed: .0, 1."],
    "--optimizer normuon --lion-beta1 0.9": ["--lion-beta1 belongs to --optimizer lion.*--normuon-beta2"],
    "--optimizer lion --muon-tp-mode blockwise": ["--muon-tp-mode belongs to matrix optimizers"],
    "--optimizer adan --adan-beta3 -1 --adan-eps 0 --weight-decay -0.1": [
        "--adan-beta3 -1.0",
        "--adan-eps 0.0",
        "--weight-decay -0.1",
    ],
    "--optimizer muon --optimizer-for neck=adam": ["--optimizer-for neck=adam.*Roles: embedding"],
    "--optimizer muon --optimizer-for head=soap": ["soap steps on matrices only"],
    "--optimizer adam --optimizer-for qkv=muon": ["--optimizer adam steps on every parameter"],
    "--optimizer muon --optimizer-for qkv=adam --optimizer-for matrix=adam --optimizer-for expert=adam "
    "--optimizer-for delta-in=adam --optimizer-for delta-out=adam": ["gives all of its roles away"],
    "--optimizer muon --qk-clip": ["--qk-clip needs", "only supported with TE"],
    "--optimizer muon --muon-tp-mode distributed": ["--muon-tp-mode distributed is not covered"],
    "--optimizer muon --muon-num-ns-steps 0": ["--muon-num-ns-steps 0: allowed: integers >= 1"],
    "--optimizer adam --undelayed-head": ["--undelayed-head.*--gradient-delay"],
    "--optimizer muon --delay-first-moment-only --gradient-delay 1": ["--delay-first-moment-only needs.*adam"],
    "--optimizer adam --staleness-correction dc-asgd": ["--staleness-correction dc-asgd corrects"],
    "--optimizer adam --staleness-correction weight-prediction --gradient-delay 1 --correction-strength inf": [
        "--correction-strength inf"
    ],
    "--optimizer adam --log-update-statistics -1": ["--log-update-statistics -1"],
}
RIGHT = [
    "--optimizer muon --adam-beta1 0.8 --muon-scalar-optimizer lion --lion-beta1 0.8 --optimizer-for norm=adam",
    "--optimizer normuon --no-normuon-nesterov --muon-no-split-qkv --normuon-fp32-matmul-prec medium",
    "--optimizer mars-m --mars-m-gamma 0 --muon-fp32-matmul-prec highest".replace(
        " --muon-fp32-matmul-prec highest", ""
    ),
]


def test_wrong_options_are_all_named(pool):
    lines = [*WRONG, *RIGHT]
    found = pool.run("tests.distributed.optimizer_jobs:problems", [line.split() for line in lines], ranks=1)[0]
    for line, problems in zip(lines, found, strict=True):
        expected = WRONG.get(line, [])
        assert len(problems) == len(expected), (line, problems)
        for problem, text in zip(problems, expected, strict=True):
            assert re.search(text, problem), (line, problem)
