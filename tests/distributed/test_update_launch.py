# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Updates that are launched as on GPUs give the numbers of those that are launched as on CPUs, bit by bit.

On CPUs the host runs to its end what it launches: slower, but the same operations in the same order.
"""

import pytest

from tests.distributed.test_parity import assert_bit_equal, train

RECIPE = "--optimizer muon --staleness-correction error-feedback --train-iters 6"
EXPERTS = (
    "--num-experts 4 --moe-ffn-hidden-size 32 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-aux-loss-coeff 0.01 --moe-token-dispatcher-type alltoall"
)
RUNS = {
    "2bw": (2, "--pipeline-model-parallel-size 2"),
    "2bw, adam": (2, "--pipeline-model-parallel-size 2 --optimizer adam"),
    "2bw, 4 stages": (4, "--pipeline-model-parallel-size 4 --qk-clip"),
    "2bw, data parallel": (4, "--pipeline-model-parallel-size 2 --optimizer adam --use-distributed-optimizer --bf16"),
    "2bw, experts": (2, f"--pipeline-model-parallel-size 2 {EXPERTS}"),
    "2bw, per token": (2, "--pipeline-model-parallel-size 2 --calculate-per-token-loss"),
    "pipedream": (2, "--pipeline-model-parallel-size 2 --global-batch-size 1 --untie-embeddings-and-output-weights"),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_moment_of_the_launch_changes_nothing(pool, name):
    ranks, layout = RUNS[name]
    arguments = f"{RECIPE} {layout} --pipeline-schedule {name.split(',')[0]}"
    expected = train(pool, f"{arguments} --update-launch at-update", ranks)
    for launch in ("when-known", "at-once"):
        found = train(pool, f"{arguments} --update-launch {launch}", ranks)
        assert_bit_equal(found, expected)
        for a, b in zip(found, expected, strict=True):
            assert a.grad_norms == b.grad_norms and a.learning_rates == b.learning_rates
