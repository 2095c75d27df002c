# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Operations between processes: one order in each group, and numbers that do not depend on when they complete."""

import pytest

from tests.distributed.test_parity import assert_bit_equal, train

RECIPE = "--optimizer muon --staleness-correction error-feedback --train-iters 6"
PP2 = "--pipeline-model-parallel-size 2"
UNTIED = "--untie-embeddings-and-output-weights"
EXPERTS = (
    "--num-experts 4 --moe-ffn-hidden-size 32 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-token-dispatcher-type alltoall --expert-model-parallel-size 2"
)
RUNS = {
    "2bw": (4, f"--pipeline-schedule 2bw {PP2} --optimizer adam --use-distributed-optimizer"),
    "2bw when known": (
        4,
        f"--pipeline-schedule 2bw {PP2} --optimizer adam --use-distributed-optimizer --update-launch when-known",
    ),
    "2bw, experts": (4, f"--pipeline-schedule 2bw {PP2} {EXPERTS}"),
    "2bw, tensor parallel": (
        4,
        f"--pipeline-schedule 2bw {PP2} --tensor-model-parallel-size 2 --sequence-parallel --update-launch when-known",
    ),
    "wpipe": (2, f"--pipeline-schedule wpipe {PP2} {UNTIED} --update-launch when-known"),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_ranks_of_a_group_start_the_same_operations_in_one_order(pool, name):
    """With stalling stages. What polling starts has groups of its own."""
    ranks, arguments = RUNS[name]
    found = pool.run("tests.distributed.operations:operations", f"{RECIPE} {arguments}".split(), 20.0, ranks=ranks)
    names = set().union(*(rank.groups for rank in found))
    assert len(names) >= 4
    for group in names:
        members = next(rank.groups[group] for rank in found if group in rank.groups)
        first, *others = (found[member].started.get(group) for member in members)
        assert first and all(other == first for other in others), (group, members)
    for rank in found:
        assert rank.polled and not rank.polled & rank.scheduled


@pytest.mark.parametrize("probability", [1.0, 0.5], ids=["late", "sometimes late"])
@pytest.mark.parametrize("name", ["2bw", "2bw when known", "wpipe"])
def test_late_completions_change_nothing(pool, name, probability):
    """A handle that is complete only once it is waited for is what a host sees that runs ahead of its device."""
    ranks, arguments = RUNS[name]
    expected = train(pool, f"{RECIPE} {arguments}", ranks)
    line = f"{RECIPE} {arguments}".split()
    late = pool.run("tests.distributed.operations:train_with_late_works", line, probability, ranks=ranks)
    assert_bit_equal(late, expected)
