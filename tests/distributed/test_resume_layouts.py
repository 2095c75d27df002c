# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A run that is resumed on another layout or schedule equals the whole one to the order of sums."""

import numpy as np
import pytest

from tests.distributed.matrix import LATENT, MODELS, UNTIED
from tests.distributed.test_resume import EF, PP2, PP2_2BW, SCHEDULES, assert_close, assert_continues, resume, train

LAYOUTS = {
    "PP4": (4, "--pipeline-model-parallel-size 4 --pipeline-schedule 2bw"),
    "PP2xTP2": (4, f"{PP2} --tensor-model-parallel-size 2 --pipeline-schedule 2bw"),
    "PP2xDP2": (4, f"{PP2} --pipeline-schedule 2bw"),
    "micro-batch 2": (2, f"{PP2} --pipeline-schedule 2bw --micro-batch-size 2"),
    "eager": (2, f"{PP2} --pipeline-schedule 2bw-eager"),
    "oracle": (1, "--gradient-delay 1"),
    "PP2": (2, f"{PP2} --pipeline-schedule 2bw"),
}


@pytest.mark.parametrize(
    ("origin", "target"),
    [
        ("PP2", "PP4"),
        ("PP2", "oracle"),
        ("PP2", "PP2xTP2"),
        ("oracle", "PP2xDP2"),
        ("PP4", "micro-batch 2"),
        ("PP4", "eager"),
    ],
)
@pytest.mark.parametrize("optimizer", ["muon"])
def test_another_layout(pool, saved, optimizer, origin, target):
    recipe = f"--optimizer {optimizer} {EF}"
    ranks, layout = LAYOUTS[origin]
    folder, whole = saved(f"{recipe} {layout}", ranks)
    ranks, layout = LAYOUTS[target]
    assert_close(resume(pool, folder, 3, f"{recipe} {layout}", ranks), whole, 3)


def test_latent_attention_on_the_same_and_on_another_layout(pool, saved):
    """Its down projections are cut by columns of a latent; a first dense layer gives layers of two kinds."""
    recipe = f"--optimizer muon {EF} {MODELS['latent']}"
    folder, whole = saved(f"{recipe} {LAYOUTS['PP2'][1]}", 2)
    assert_continues(resume(pool, folder, 3, f"{recipe} {LAYOUTS['PP2'][1]}", 2), whole, 3)
    ranks, layout = LAYOUTS["PP2xTP2"]
    assert_close(resume(pool, folder, 3, f"{recipe} {layout} --sequence-parallel", ranks), whole, 3)


def test_from_2bw_to_1f1b_is_a_synchronous_cooldown(pool, saved):
    folder, _ = saved(f"--optimizer adam {EF} {SCHEDULES['2bw'][1]}", 2)
    expected = train(pool, f"--optimizer adam {EF} {SCHEDULES['2bw'][1]} --sync-cooldown-iters 3", 2)
    assert_close(resume(pool, folder, 3, f"--optimizer adam {PP2}", 2), expected, 3)


def test_from_1f1b_to_2bw_is_a_synchronous_start(pool, saved):
    folder, _ = saved(f"--optimizer adam {PP2}", 2)
    recipe = f"--optimizer adam {EF} {SCHEDULES['2bw'][1]}"
    expected = train(pool, f"{recipe} --sync-start-iters 3", 2)
    assert_close(resume(pool, folder, 3, recipe, 2), expected, 3)


# WPipe clips each chunk by a norm of its own.
CHUNKS = f"--optimizer adam --clip-grad 0 {UNTIED}"


def test_from_wpipe_to_1f1b_is_a_synchronous_cooldown(pool, saved):
    """The optimizers of two chunks become one."""
    folder, _ = saved(f"{CHUNKS} {PP2} --pipeline-schedule wpipe", 2)
    expected = train(pool, f"{CHUNKS} {PP2} --pipeline-schedule wpipe --sync-cooldown-iters 3", 2)
    assert_close(resume(pool, folder, 3, f"{CHUNKS} {PP2}", 2), expected, 3)


@pytest.mark.parametrize(
    ("origin", "target", "oracle"), [("wpipe", "2bw", "1"), ("2bw", "wpipe", "wpipe")], ids=["from", "to"]
)
def test_between_wpipe_and_2bw(pool, saved, origin, target, oracle):
    """The delay oracle from the same checkpoint."""
    folder, _ = saved(f"{CHUNKS} {PP2} --pipeline-schedule {origin}", 2)
    expected = resume(pool, folder, 3, f"{CHUNKS} --gradient-delay {oracle}", 1)
    assert_close(resume(pool, folder, 3, f"{CHUNKS} {PP2} --pipeline-schedule {target}", 2), expected, 0)


DISTRIBUTED = "--optimizer adam --use-distributed-optimizer"
EP2, EP4 = (f"--expert-model-parallel-size {size}" for size in (2, 4))
MOE = MODELS["moe"]
# Recipe, then ranks and arguments of the run that saves and of the one that resumes.
SHARDED = {
    "DP2 to DP1": (DISTRIBUTED, (2, ""), (1, "")),
    "PP2xDP2 to PP2": (f"{DISTRIBUTED} {EF}", (4, PP2_2BW), (2, PP2_2BW)),
    "PP2xDP2 to one process": (f"{DISTRIBUTED} {EF}", (4, PP2_2BW), (1, "--gradient-delay 1")),
    "EP2 to EP4": (f"--optimizer adam {MOE}", (2, EP2), (4, EP4)),
    "EP2 to one process": (f"--optimizer adam {MOE}", (2, EP2), (1, "")),
    "one process to EP2": (f"--optimizer muon {MOE}", (1, ""), (2, EP2)),
    "PP2xEP2 to PP2xDP1": (f"{DISTRIBUTED} {MOE} {EF}", (4, f"{PP2_2BW} {EP2}"), (2, PP2_2BW)),
    "layer-wise, DP2 to EP2": (f"--optimizer muon --use-distributed-optimizer {MOE}", (2, ""), (2, EP2)),
    "HybridModel, PP2 to PP4": (
        f"--optimizer muon {MODELS['hybrid']} {EF}",
        (2, PP2_2BW),
        (4, "--pipeline-model-parallel-size 4 --pipeline-schedule 2bw"),
    ),
    "WPipe on PP2xEP2 to one process": (
        f"--optimizer adam --clip-grad 0 {UNTIED} {MOE}",
        (4, f"{PP2} {EP2} --pipeline-schedule wpipe"),
        (1, "--gradient-delay wpipe"),
    ),
}


GPT_AS_HYBRID = {
    "uneven stages": (2, f"--hybrid-layer-pattern *-*-*|-*- {PP2_2BW}"),
    "one process": (1, "--hybrid-layer-pattern *-*-*-*- --gradient-delay 1"),
}


@pytest.mark.parametrize("layout", GPT_AS_HYBRID)
def test_a_gpt_continues_as_a_hybrid_model(pool, saved, layout):
    """Weights, older versions, optimizer state and previous updates find their places."""
    ranks, arguments = GPT_AS_HYBRID[layout]
    folder, whole = saved(f"--optimizer muon {EF} {PP2_2BW}", 2)
    assert_losses_go_on(resume(pool, folder, 3, f"--optimizer muon {EF} {arguments}", ranks), whole)


def assert_losses_go_on(found, whole):
    losses = [outcome.losses for outcome in (*whole, *found) if outcome.losses]
    np.testing.assert_allclose(losses[-1], losses[0][3:], rtol=1e-5)


def test_a_gpt_with_latents_continues_as_a_hybrid_model_after_a_conversion(pool, saved, tmp_path):
    recipe = f"--optimizer muon {LATENT} {EF}"
    folder, whole = saved(f"{recipe} {PP2_2BW}", 2)
    (tmp_path / ".unfinished" / "iter_0000003").mkdir(parents=True)  # a conversion was killed before
    words = ["to-hybrid", "--load", str(folder), "--ckpt-step", "3", "--save", str(tmp_path)]
    assert pool.run("tests.distributed.megatron_jobs:convert", words, ranks=1) == [0]
    arguments = f"{recipe} --hybrid-layer-pattern +-+-+|-+- {PP2_2BW}"
    assert_losses_go_on(resume(pool, tmp_path, 3, arguments, 2), whole)


@pytest.mark.parametrize("change", SHARDED)
def test_sharded_state_on_another_layout(pool, saved, change):
    recipe, origin, target = SHARDED[change]
    folder, whole = saved(f"{recipe} {origin[1]}", origin[0])
    assert_close(resume(pool, folder, 3, f"{recipe} {target[1]}", target[0]), whole, 3)


HYBRID = "--model moe-10b-hybrid-mini --num-layers 4 --staleness-correction error-feedback"
UNEVEN = {
    "three layers and one": (2, f"{PP2_2BW} --decoder-first-pipeline-num-layers 3"),
    "head alone": (2, f"{PP2_2BW} --pipeline-model-parallel-layout Et*4|L"),
    "PP4": (4, "--pipeline-model-parallel-size 4 --pipeline-schedule 2bw"),
    "one process": (1, "--gradient-delay 1"),
}


def train_hybrid(pool, layout: str, more: str):
    ranks, arguments = UNEVEN[layout]
    line = f"{HYBRID} {arguments} --train-iters 5 {more}"
    return pool.run("tests.distributed.model_jobs:train", line.split(), ranks=ranks, timeout=600)


@pytest.fixture(scope="module")
def hybrid(pool, tmp_path_factory):
    """A run on uneven stages that left a checkpoint on the way: folder, outcomes."""
    folder = tmp_path_factory.mktemp("hybrid")
    return folder, train_hybrid(pool, "three layers and one", f"--save {folder} --save-interval 3")


@pytest.mark.parametrize("target", UNEVEN)
def test_hybrid_from_uneven_stages(pool, hybrid, target):
    """Linear and softmax attention, routers and experts move to other stages."""
    folder, whole = hybrid
    assert_close(train_hybrid(pool, target, f"--load {folder} --ckpt-step 3"), whole, 3)


def test_a_stage_without_experts(pool, saved):
    """Its optimizer of experts has no parameters; what rank 0 saves of it serves the other stages too."""
    recipe = f"--optimizer adam {MOE} --moe-layer-freq [0,0,1,1] {EF}"
    folder, whole = saved(f"{recipe} {PP2_2BW} {EP2}", 4)
    assert_close(resume(pool, folder, 3, f"{recipe} {PP2_2BW}", 2), whole, 3)
