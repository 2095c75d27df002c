# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Libraries that a GPU run uses and a CPU run does not, through stand-ins with their behavior."""

from pathlib import Path

import pytest

from benchmarks.processes import Pool
from tests.distributed.jobs import Outcome
from tests.distributed.test_parity import assert_bit_equal, assert_same_run, train
from tests.distributed.test_resume import assert_continues

PP2 = "--pipeline-model-parallel-size 2"
UNTIED = "--untie-embeddings-and-output-weights"
EF = "--staleness-correction error-feedback"


def train_with(pool: Pool, standin: str, arguments: str, ranks: int = 2) -> list[Outcome]:
    return pool.run("tests.distributed.standin_jobs:train_with", standin, arguments.split(), ranks=ranks)


@pytest.mark.parametrize("launch", ["at-update", "when-known", "at-once"])
def test_fused_adam_equals_torchs(pool, launch):
    arguments = f"--optimizer adam {EF} {PP2} --pipeline-schedule 2bw --bf16 {UNTIED} --update-launch {launch}"
    fused, expected = train_with(pool, "FusedAdam", arguments), train(pool, arguments, 2)
    for one, other in zip(fused, expected, strict=True):
        assert one.losses == pytest.approx(other.losses, rel=2e-3)
        assert one.learning_rates == other.learning_rates
        assert one.grad_norms == pytest.approx(other.grad_norms, rel=2e-2)


def test_fused_adam_equals_torchs_in_fp32(pool):
    arguments = f"--optimizer adam {EF} {PP2} --pipeline-schedule 2bw"
    assert_same_run(
        train_with(pool, "FusedAdam", arguments), train(pool, f"--optimizer adam {EF} --gradient-delay 1", 1)[0]
    )


@pytest.mark.parametrize("optimizer", ["adam", "nadam", "muon"])
@pytest.mark.parametrize("sharding", ["", "--use-distributed-optimizer"])
def test_runs_with_fused_adam_resume(pool: Pool, tmp_path: Path, sharding: str, optimizer: str) -> None:
    """Its state dictionary knows the names of its own state only, and Megatron looks for the steps of its groups."""
    ranks = 4 if sharding else 2
    recipe = f"--optimizer {optimizer} {EF} {PP2} --pipeline-schedule 2bw {sharding}"
    whole = train_with(pool, "FusedAdam", f"{recipe} --save {tmp_path} --save-interval 3", ranks)
    rest = train_with(pool, "FusedAdam", f"{recipe} --load {tmp_path} --ckpt-step 3", ranks)
    assert_continues(rest, whole, 3)


SCHEDULES = {
    "2bw": (2, f"{PP2} --pipeline-schedule 2bw {EF}"),
    "2bw-eager": (2, f"{PP2} --pipeline-schedule 2bw-eager {EF}"),
    "wpipe": (2, f"{PP2} --pipeline-schedule wpipe {UNTIED}"),
    "tensor parallel": (
        4,
        f"{PP2} --pipeline-schedule 2bw --tensor-model-parallel-size 2 --sequence-parallel --optimizer muon",
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_fused_weight_gradients_change_nothing(pool, name):
    """The kernel adds to the buffer that a forward has noted; the backward of another batch may run in between."""
    ranks, arguments = SCHEDULES[name]
    assert_bit_equal(train_with(pool, "fused weight gradients", arguments, ranks), train(pool, arguments, ranks))


def test_the_stand_in_adds_every_gradient_of_a_linear_layer(pool):
    """Four projections in each of a stage's two layers, and the head, in 6 batches of 8 micro-batches."""
    arguments, job = f"{PP2} --pipeline-schedule 2bw".split(), "tests.distributed.standin_jobs:fused_gradients"
    assert pool.run(job, arguments, ranks=2) == [4 * 2 * 48, (4 * 2 + 1) * 48]
    assert pool.run(job, [*arguments, "--no-gradient-accumulation-fusion"], ranks=2) == [0, 0]


@pytest.mark.parametrize("rows", [(2, 2), (1, 3), (0, 3), (3, 0)])
def test_collectives_of_shards_of_any_size(pool: Pool, rows: tuple[int, int]) -> None:
    """The stand-ins for what gloo refuses give what the collectives are defined to give."""
    starts = (0, rows[0])
    for rank, (gathered, scattered, exchanged) in enumerate(
        pool.run("tests.distributed.standin_jobs:uneven_collectives", rows, ranks=2)
    ):
        assert gathered == [100 * source + row for source in (0, 1) for row in range(rows[source])]
        own = range(starts[rank], starts[rank] + rows[rank])
        assert scattered == [100 + 2 * row for row in own]
        assert exchanged == [100 * source + row for source in (0, 1) for row in own]
