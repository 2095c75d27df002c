# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Delayed schedules train where communicators are made together at first use and are one queue each, as NCCL's are."""

import pytest

from benchmarks.processes import JobFailed

RECIPE = "--optimizer muon --staleness-correction error-feedback --train-iters 4"
UNTIED = "--untie-embeddings-and-output-weights"
RUNS = {
    "2bw": (2, "--pipeline-schedule 2bw"),
    "2bw, 4 stages": (4, "--pipeline-schedule 2bw"),
    "2bw-eager, 4 stages": (4, "--pipeline-schedule 2bw-eager"),
    "wpipe": (2, f"--pipeline-schedule wpipe {UNTIED}"),
    "2bw, data parallel": (4, "--pipeline-schedule 2bw"),
}


def arguments_of(name: str) -> tuple[int, list[str]]:
    ranks, schedule = RUNS[name]
    stages = 2 if "data parallel" in name else ranks
    return ranks, f"{RECIPE} {schedule} --pipeline-model-parallel-size {stages}".split()


@pytest.mark.parametrize("bound", [False, True], ids=["lazy", "bound"])
@pytest.mark.parametrize("name", RUNS)
def test_losses_are_those_without_the_rules(pool, name, bound):
    ranks, arguments = arguments_of(name)
    plain = pool.run("tests.distributed.jobs:train", arguments, ranks=ranks)
    ruled = pool.run("tests.distributed.communicators:train_under_nccl_rules", arguments, bound, ranks=ranks)
    assert ruled[-1].losses == plain[-1].losses and len(plain[-1].losses) == 4
    assert ruled[-1].grad_norms == plain[-1].grad_norms


def test_the_rules_find_a_first_receive_that_is_posted_too_early(pool):
    ranks, arguments = arguments_of("2bw")
    with pytest.raises(JobFailed, match="was not made by all of its ranks"):
        pool.run("tests.distributed.communicators:train_as_before", arguments, False, ranks=ranks)
