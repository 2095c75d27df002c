# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The planner's bytes of optimizer state and corrections against those that a run allocates."""

import pytest

from tests.distributed.matrix import MODELS, UNTIED

PIPELINE = "--pipeline-model-parallel-size 2 --pipeline-schedule"
# Name: ranks, arguments.
RUNS = {
    "routers": (2, f"--optimizer muon {MODELS['moe']} {PIPELINE} 2bw"),
    "optimizer for roles": (
        2,
        f"--optimizer muon --optimizer-for qkv=adan --optimizer-for norm=mars --optimizer-for embedding=signum "
        f"--muon-scalar-optimizer lion {PIPELINE} 2bw",
    ),
    "linear attention": (1, "--model moe-10b-hybrid-mini --num-layers 4 --optimizer normuon --gradient-delay 1"),
    "error-feedback": (2, f"--optimizer adam {PIPELINE} 2bw"),
    "weight-prediction": (2, f"--optimizer normuon {PIPELINE} 2bw"),
    "weight-prediction-updated": (2, f"--optimizer mars-m {PIPELINE} 2bw"),
    "dc-asgd": (2, f"--optimizer soap {PIPELINE} 2bw"),
    "gradient-error-feedback": (2, f"--optimizer adamuon --bf16 {PIPELINE} 2bw"),
    "raw-gradient-error-feedback": (1, "--optimizer adam --gradient-delay 1"),
    "wpipe": (2, f"--optimizer mars {UNTIED} --staleness-correction error-feedback {PIPELINE} wpipe"),
    "pipedream": (
        2,
        f"--optimizer sgd {UNTIED} --global-batch-size 1 --staleness-correction dc-asgd {PIPELINE} pipedream",
    ),
    "oracle of wpipe": (1, "--optimizer nadam --staleness-correction weight-prediction --gradient-delay wpipe"),
    "head without delay": (
        1,
        f"--optimizer lion {UNTIED} --undelayed-head --staleness-correction error-feedback --gradient-delay 2",
    ),
}
CORRECTIONS = [name for name in RUNS if name.endswith(("feedback", "prediction", "updated", "asgd"))]


@pytest.mark.parametrize("name", RUNS)
def test_planned_bytes_are_those_that_a_run_allocates(pool, name):
    ranks, arguments = RUNS[name]
    if name in CORRECTIONS:
        arguments += f" --staleness-correction {name}"
    for held, planned in pool.run("tests.distributed.optimizer_jobs:state_bytes", arguments.split(), ranks=ranks):
        assert planned == held
        assert held["optimizer_state"] > 0
    if "--staleness-correction" in arguments:
        assert held["correction"] > 0 or "pipedream" in name  # of the last stage, which has no delay there
    else:
        assert held["correction"] == 0


def test_every_correction_is_compared():
    from megatron_async.optim.corrections import CORRECTIONS as known

    assert {"none", *CORRECTIONS} == set(known)


def test_wpipe_keeps_nothing_for_its_second_half(pool):
    ranks, arguments = RUNS["wpipe"]
    for held, _ in pool.run("tests.distributed.optimizer_jobs:state_bytes", arguments.split(), ranks=ranks):
        # MARS keeps three numbers for each weight of a matrix; half of the matrices have a delay.
        assert 0 < held["correction"] < 0.25 * held["optimizer_state"]
