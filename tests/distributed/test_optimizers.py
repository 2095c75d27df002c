# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Every optimizer and every correction under a real schedule against the delay oracle."""

import json
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from benchmarks.processes import JobFailed, Pool
from megatron_async.optim.registry import names
from tests.distributed.jobs import Outcome
from tests.distributed.matrix import MODELS, difference

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
    return cache(lambda recipe: train(pool, f"{recipe} --gradient-delay 1", 1)[0])


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
        for name in ("error-feedback", "weight-prediction", "gradient-error-feedback", "raw-gradient-error-feedback")
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


CLIP = "--qk-clip --qk-clip-threshold 0.06 --qk-clip-alpha 0.4"
GROUPS = "--group-query-attention --num-query-groups 2"
WPIPE = "--pipeline-model-parallel-size 2 --pipeline-schedule wpipe"
# Name: arguments of both runs, layout, ranks.
CLIPPED = {
    "2bw": (f"--optimizer muon {FEEDBACK}", PIPELINE, 2),
    "wpipe": (f"--optimizer muon {FEEDBACK} --untie-embeddings-and-output-weights", WPIPE, 2),
    "tensor parallel, gate": (
        f"--optimizer muon {FEEDBACK} --attention-output-gate",
        f"{PIPELINE} --tensor-model-parallel-size 2 --sequence-parallel",
        4,
    ),
    "flat parts, biases": (f"--optimizer adam {FEEDBACK} --add-qkv-bias", f"{PIPELINE} --use-distributed-optimizer", 4),
    "layer-wise, 16 bits": (
        f"--optimizer muon {FEEDBACK} --bf16 --train-iters 4 --untie-embeddings-and-output-weights",
        f"{PIPELINE} --use-distributed-optimizer",
        4,
    ),
    "latent attention": (f"--optimizer muon {FEEDBACK} {MODELS['latent']} --clip-grad 1.0", PIPELINE, 2),
}


@pytest.mark.parametrize("name", CLIPPED)
def test_qk_clip_equals_the_oracle(pool, reference, name):
    """Queries of a group share their keys; a batch's maxima are those of all its micro-batches on all ranks."""
    arguments, layout, ranks = CLIPPED[name]
    recipe = f"{arguments} {CLIP} {'' if name == 'latent attention' else GROUPS}"
    if "wpipe" in layout:
        expected = train(pool, f"{recipe} --gradient-delay wpipe", 1)[0]
    else:
        expected = reference(recipe)
    pipeline = train(pool, f"{recipe} {layout}", ranks)
    assert difference(pipeline, expected, norms=True) <= (2e-2 if "bf16" in recipe else TOLERANCE)
    if name == "2bw":
        free = reference(recipe.replace("--qk-clip-threshold 0.06", "--qk-clip-threshold 1e9"))
        assert difference([expected], free, norms=True) > 1e-3, "nothing was clipped"


def test_qk_clip_that_never_clips_is_none_to_the_last_bit(pool):
    recipe = f"--optimizer muon {FEEDBACK} {PIPELINE}"
    without = train(pool, recipe, 2)
    idle = train(pool, f"{recipe} --qk-clip --qk-clip-threshold 1e9", 2)
    for left, right in zip(without, idle, strict=True):
        assert left.losses == right.losses and left.grad_norms == right.grad_norms
        assert all(np.array_equal(weight, right.weights[key]) for key, weight in left.weights.items())


def test_attention_logits_come_down_where_qk_clip_is_on(pool, tmp_path: Path):
    """At a high rate they outgrow the threshold within the delay, and are brought back; without the clip they go on."""
    recipe = "--optimizer muon --train-iters 14 --lr 0.1 --lr-decay-style constant"
    clip = "--qk-clip --qk-clip-threshold 0.5"
    largest = {}
    for name, extra, layout, ranks in [
        ("free", "--log-max-attention-logit", "--gradient-delay 1", 1),
        ("clipped", clip, PIPELINE, 2),
        ("oracle", clip, "--gradient-delay 1", 1),
    ]:
        file = tmp_path / f"{name}.jsonl"
        arguments = f"{recipe} {extra} {layout} --metrics-file {file}".split()
        pool.run("tests.distributed.jobs:train_on_whole_corpus", arguments, ranks=ranks)
        largest[name] = [json.loads(line)["max_attention_logit"] for line in file.read_text().splitlines()[1:]]
    assert largest["clipped"] == pytest.approx(largest["oracle"], rel=1e-2)
    assert max(largest["free"]) > 3 and largest["free"][-1] > 3
    peak = int(np.argmax(largest["clipped"]))
    assert largest["clipped"][peak] < 2 and min(largest["clipped"][peak:]) < 0.7


def test_several_optimizers_side_by_side(pool, reference):
    recipe = "--optimizer muon --optimizer-for qkv=adamuon --optimizer-for norm=lion --optimizer-for embedding=nadam"
    recipe = f"{recipe} --lr 0.005 --min-lr 0.0005 {FEEDBACK}"
    assert difference(train(pool, f"{recipe} {PIPELINE}", 2), reference(recipe), norms=True) <= TOLERANCE


def test_a_role_that_the_model_does_not_have(pool):
    with pytest.raises(JobFailed, match=r"--optimizer-for router=adam: the model has no parameter of that role"):
        train(pool, f"--optimizer muon --optimizer-for router=adam {PIPELINE}", 2)


def test_a_gradient_that_is_no_number_changes_nothing(pool):
    """No state on any stage, and no weights: a pipeline with stalling stages goes on as the delay oracle does, whose
    forwards after the skipped update are one update old."""
    recipe = f"--optimizer normuon {FEEDBACK}"
    runs = {}
    at_once = f"{PIPELINE} --update-launch at-once"
    for layout, ranks, sleep_ms in ((PIPELINE, 2, 20.0), (at_once, 2, 0.0), ("--gradient-delay 1", 1, 0.0)):
        arguments = f"{recipe} {layout}".split()
        answers = pool.run(
            "tests.distributed.optimizer_jobs:train_with_a_bad_gradient", arguments, 3, sleep_ms, ranks=ranks
        )
        for outcome, unchanged in answers:
            assert outcome.skipped == [False, False, False, True, False, False]
            assert unchanged == outcome.skipped
        runs[layout] = [outcome for outcome, _ in answers]
    pipeline, (expected,) = runs[PIPELINE], runs["--gradient-delay 1"]
    np.testing.assert_allclose(pipeline[-1].losses, expected.losses, rtol=TOLERANCE)  # NaN equals NaN here
    for outcome in pipeline:
        for name, weight in outcome.weights.items():
            np.testing.assert_allclose(weight, expected.weights[name], rtol=TOLERANCE, atol=2e-5, err_msg=name)
    for outcome, other in zip(runs[at_once], pipeline, strict=True):
        assert outcome.learning_rates == other.learning_rates
        for name, weight in outcome.weights.items():
            np.testing.assert_array_equal(weight, other.weights[name], err_msg=name)


def test_a_delay_of_nothing_is_none_to_the_last_bit(pool):
    plain, delayed = (train(pool, f"--optimizer muon --train-iters 20 {delay}", 1)[0] for delay in DELAYS_OF_NOTHING)
    assert plain.losses == delayed.losses and len(plain.losses) == 20
    assert all(np.array_equal(weight, delayed.weights[name]) for name, weight in plain.weights.items())


DELAYS_OF_NOTHING = ("", "--gradient-delay 0")
ONE_STEP = "--train-iters 1 --lr-warmup-iters 0 --lr-decay-style constant --weight-decay 0"


def matrices(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The hidden matrices of the test's model, queries, keys and values separately."""
    found = {name: weight for name, weight in weights.items() if name.endswith(("linear_proj.weight", "fc1.weight"))}
    found |= {name: weight for name, weight in weights.items() if name.endswith("linear_fc2.weight")}
    for name, weight in weights.items():
        if name.endswith("linear_qkv.weight"):
            heads = weight.reshape(4, 3, 8, 32)
            found |= {f"{name} {part}": heads[:, index].reshape(32, 32) for index, part in enumerate("qkv")}
    return found


MUON_WRAPPERS = {
    "one process": ("", 1),
    "one micro-batch": ("--micro-batch-size 8", 1),
    "bf16": ("--bf16", 1),
    "data parallel": ("", 2),
    "layer-wise": ("--use-distributed-optimizer", 2),
    "layer-wise, bf16": ("--use-distributed-optimizer --bf16", 2),
}


@pytest.mark.parametrize("wrapper", MUON_WRAPPERS)
def test_muon_moves_matrices_by_orthogonal_ones(pool, initial_weights, wrapper):
    """Whatever wraps it: the change of a matrix over lr times its scale has singular values near 1."""
    arguments, ranks = MUON_WRAPPERS[wrapper]
    for outcome in train(pool, f"--optimizer muon {ONE_STEP} {arguments}", ranks):
        assert len(matrices(outcome.weights)) == 4 * 6
        for spectrum in spectra(initial_weights, outcome.weights).values():
            assert spectrum.max() < 1.25 and np.median(spectrum) > 0.9


def test_the_spectrum_would_tell_another_optimizer(pool, initial_weights):
    (outcome,) = train(pool, f"--optimizer adam {ONE_STEP}", 1)
    for spectrum in spectra(initial_weights, outcome.weights).values():
        assert spectrum.max() > 1.25 or np.median(spectrum) < 0.6


@pytest.fixture(scope="module")
def initial_weights(pool: Pool) -> dict[str, np.ndarray]:
    return pool.run("tests.distributed.jobs:initial_state", ["--optimizer", "muon"], 0, ranks=1)[0][0]


def spectra(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Singular values of the change of every hidden matrix in units of Muon's step at the rate 0.02."""
    pairs = zip(matrices(before).items(), matrices(after).values(), strict=True)
    return {
        name: np.linalg.svd((old - new) / (0.02 * 0.2 * max(old.shape) ** 0.5), compute_uv=False)
        for (name, old), new in pairs
    }


def test_clipping_does_not_change_the_step_of_a_matrix(pool):
    runs = [train(pool, f"--optimizer muon {ONE_STEP} --clip-grad {limit}", 1)[0] for limit in (0, 1.0, 1e-4)]
    for name, weight in matrices(runs[0].weights).items():
        for clipped in runs[1:]:
            np.testing.assert_allclose(matrices(clipped.weights)[name], weight, rtol=0, atol=2e-6, err_msg=name)


def test_matrices_that_ranks_cannot_share_evenly(pool):
    """Four matrices, some with an odd side, on three data-parallel ranks."""
    recipe = "--optimizer muon --num-layers 1 --ffn-hidden-size 63 --global-batch-size 9"
    (expected,) = train(pool, recipe, 1)
    assert difference(train(pool, f"{recipe} --use-distributed-optimizer", 3), expected, norms=True) <= TOLERANCE


def test_groups_step_with_what_the_command_line_says(pool):
    arguments = "--optimizer muon --muon-momentum 0.9 --adam-beta1 0.8 --adam-eps 1e-6 --weight-decay 0.05"
    (groups,) = pool.run("tests.distributed.optimizer_jobs:parameter_groups", arguments.split(), ranks=1)
    muon = [(count, values) for name, count, values in groups if name == "Muon"]
    adam = [(count, values) for name, count, values in groups if name == "AdamW"]
    assert len(muon) + len(adam) == len(groups)
    assert sum(count for count, _ in muon) == 16 and all(values["momentum"] == 0.9 for _, values in muon)
    assert all(values["weight_decay"] == 0.05 and values["max_lr"] == 0.02 for _, values in muon)
    assert all(values["betas"] == (0.8, 0.95) and values["eps"] == 1e-6 for _, values in adam)
    decays = {values["weight_decay"]: count for count, values in adam}
    assert decays == {0.05: 1, 0.0: 9}  # the embedding; the norms


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


def test_a_fresh_gradient_is_the_one_that_the_next_batch_has(pool):
    words = "--optimizer adam --gradient-delay 1 --clip-grad 0".split()
    norms = pool.run("tests.distributed.optimizer_jobs:fresh_and_stale", words, ranks=1)[0]
    assert len(norms) == 6
    np.testing.assert_allclose([fresh for fresh, _ in norms[:-1]], [stale for _, stale in norms[1:]], rtol=1e-6)
    assert all(abs(fresh / stale - 1) > 1e-3 for fresh, stale in norms)


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
    "--optimizer-for delta-in=adam --optimizer-for delta-out=adam --optimizer-for mamba-in=adam "
    "--optimizer-for mamba-out=adam": ["gives all of its roles away"],
    "--optimizer muon --qk-clip --qk-clip-alpha 1 --qk-layernorm": [
        "--qk-clip-alpha 1.0",
        "--qk-layernorm.*normalized",
    ],
    "--optimizer muon --qk-clip-threshold 50": ["--qk-clip-threshold without --qk-clip"],
    "--optimizer muon --muon-tp-mode distributed": ["--muon-tp-mode distributed is not covered"],
    "--optimizer muon --muon-num-ns-steps 0": ["--muon-num-ns-steps 0: allowed: integers >= 1"],
    "--optimizer adam --pipeline-schedule 2bw --staleness-correction raw-gradient-error-feedback": [
        "raw-gradient-error-feedback corrects the whole gradient.*--gradient-delay",
        "--pipeline-model-parallel-size is 1",
    ],
    "--optimizer adam --undelayed-head": ["--undelayed-head.*--gradient-delay"],
    "--optimizer muon --delay-first-moment-only --gradient-delay 1": ["--delay-first-moment-only needs.*adam"],
    "--optimizer adam --staleness-correction dc-asgd": ["--staleness-correction dc-asgd corrects"],
    "--optimizer adam --staleness-correction weight-prediction --gradient-delay 1 --correction-strength inf": [
        "--correction-strength inf"
    ],
    "--optimizer adam --correct-matrices-only --muon-split-gate-up": [
        "--muon-split-gate-up belongs to matrix optimizers",
        "--correct-matrices-only without --staleness-correction",
    ],
    "--optimizer adam --log-update-statistics -1": ["--log-update-statistics -1"],
}
RIGHT = [
    "--optimizer muon --qk-clip --qk-clip-threshold 50 --log-max-attention-logit",
    "--optimizer muon --adam-beta1 0.8 --muon-scalar-optimizer lion --lion-beta1 0.8 --optimizer-for norm=adam",
    "--optimizer soap --muon-split-gate-up --staleness-correction dc-asgd --correct-matrices-only --gradient-delay 1",
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
