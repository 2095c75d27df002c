# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Megatron's wrappers around Transformer Engine's layers, the default on GPUs, with a stand-in that computes in torch.

The reference is the delay oracle with Megatron's local layers: another implementation of every layer.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.processes import Pool
from tests import standins
from tests.distributed.jobs import BASE, SMALL_CORPUS, Outcome
from tests.distributed.matrix import LATENT
from tests.distributed.test_parity import assert_bit_equal, assert_same_run, train
from tests.distributed.test_resume import assert_continues

EF = "--staleness-correction error-feedback"
PP2 = "--pipeline-model-parallel-size 2 --pipeline-schedule 2bw"
EXPERTS = (
    "--num-experts 4 --moe-ffn-hidden-size 32 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-aux-loss-coeff 0.01 --moe-token-dispatcher-type alltoall"
)
LOCAL_NAMES = (
    (r"self_attention\.linear_qkv\.layer_norm_weight", "input_layernorm.weight"),
    (r"self_attention\.linear_(q|kv)_up_proj\.layer_norm_weight", r"self_attention.\1_layernorm.weight"),
    (r"mlp\.linear_fc1\.layer_norm_weight", "pre_mlp_layernorm.weight"),
    (r"experts\.(linear_fc.)\.weight(\d+)", r"experts.local_experts.\2.\1.weight"),
)
"""Names of Transformer Engine's layers, and of Megatron's local ones."""


@pytest.fixture(scope="module")
def engine() -> Iterator[Pool]:
    """Workers that find the stand-in where they look for Transformer Engine."""
    with Pool(SMALL_CORPUS, libraries=Path(standins.__path__[0]) / "site") as workers:
        yield workers


def train_with(engine: Pool, arguments: str, standin: str = "Transformer Engine") -> list[Outcome]:
    return engine.run("tests.distributed.standin_jobs:train_with", standin, arguments.split(), ranks=2, timeout=300)


def local_name(name: str) -> str:
    for pattern, local in LOCAL_NAMES:
        name = re.sub(pattern, local, name)
    return name


RUNS = {
    "dense": f"--optimizer muon {EF}",
    "experts": f"--optimizer adam {EF} {EXPERTS}",
    "grouped experts": f"--optimizer adam {EF} {EXPERTS} --moe-grouped-gemm --recompute-granularity selective",
    "latent attention": f"--optimizer muon {EF} {LATENT}",
}


@pytest.mark.parametrize("name", RUNS)
def test_runs_equal_the_oracle_with_local_layers(pool: Pool, engine: Pool, name: str) -> None:
    local = re.sub("--moe-grouped-gemm|--recompute.*", "", RUNS[name])
    expected = train(pool, f"{local} --gradient-delay 1", 1)[0]
    found = train_with(engine, f"{RUNS[name]} {PP2}")
    renamed = [
        replace(own, weights={local_name(name): weight for name, weight in own.weights.items()}) for own in found
    ]
    assert renamed[0].weights.keys() != found[0].weights.keys()
    assert_same_run(renamed, expected)


def test_latent_attention_without_a_latent_of_queries(engine: Pool) -> None:
    """Local layers lack its norm of queries, so the oracle has the stand-in too."""
    recipe = (
        f"--optimizer muon {EF} --multi-latent-attention --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
        "--v-head-dim 12 --qk-layernorm --rope-type rope"
    )
    oracle = f"{recipe} --gradient-delay 1".split()
    job = "tests.distributed.standin_jobs:train_with"
    (expected,) = engine.run(job, "Transformer Engine", oracle, ranks=1, timeout=300)
    assert any(name.endswith("linear_q_proj.layer_norm_weight") for name in expected.weights)
    assert_same_run(train_with(engine, f"{recipe} {PP2}"), expected)


def test_squared_relu_of_experts_is_fused(pool: Pool, engine: Pool) -> None:
    """--use-fused-weighted-squared-relu, which local experts do not have."""
    base = [word for word in BASE if word != "--swiglu"]
    recipe = f"--optimizer adam {EF} {EXPERTS} --squared-relu"
    expected = pool.run("tests.distributed.jobs:train", f"{recipe} --gradient-delay 1".split(), 0.0, (), base, ranks=1)
    words = f"{recipe} {PP2} --moe-grouped-gemm --use-fused-weighted-squared-relu".split()
    given = engine.run("tests.distributed.standin_jobs:fused_squared_relus", words, base, ranks=2, timeout=300)
    assert all(count > 0 for _, count in given)
    np.testing.assert_allclose(given[-1][0].losses, expected[0].losses, rtol=1e-5)


def test_main_grad_may_be_taken_at_forward(engine: Pool) -> None:
    """As before 2.6: a forward selects the gradients of its batch."""
    arguments = f"--optimizer muon {PP2}"
    early = train_with(engine, arguments, "Transformer Engine, main_grad at forward")
    assert_bit_equal(early, train_with(engine, arguments))


def test_runs_resume(engine: Pool, tmp_path: Path) -> None:
    """With Adam of Transformer Engine, and a correction that adds to its state."""
    recipe = f"--optimizer adam {EF} {PP2} {EXPERTS} --moe-grouped-gemm"
    whole = train_with(engine, f"{recipe} --save {tmp_path} --save-interval 3")
    rest = train_with(engine, f"{recipe} --load {tmp_path} --ckpt-step 3")
    assert_continues(rest, whole, 3)
