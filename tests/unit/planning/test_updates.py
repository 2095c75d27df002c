# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Products of matrices in an optimizer's step: counted by torch, planned by shape, part of the idle time."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_async import platform

platform.activate("cpu")

from megatron_async.config import arguments  # noqa: E402
from megatron_async.optim import registry  # noqa: E402
from megatron_async.optim.layout import LAYOUT, Layout  # noqa: E402
from megatron_async.planning import devices  # noqa: E402
from megatron_async.planning.costs import CostModel  # noqa: E402
from megatron_async.planning.parameters import blocks  # noqa: E402

H100 = devices.find("h100")


@pytest.mark.parametrize("name", ["muon", "normuon", "adamuon", "mars-m"])
@pytest.mark.parametrize(("shape", "rows"), [((24, 40), ()), ((40, 24), ()), ((64, 24), (16, 8, 8))])
def test_products_are_those_of_a_step(name, shape, rows):
    spec, layout = registry.find(name), Layout(rows)
    param = torch.nn.Parameter(torch.randn(shape))
    setattr(param, LAYOUT, layout)
    optimizer = spec.build([param], fp32_matmul_prec="highest", num_ns_steps=3)
    param.grad = torch.randn(shape)
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    values = spec.hyperparameters(fp32_matmul_prec="highest", num_ns_steps=3)
    whole = layout.shapes(shape)
    assert sum(map(math.prod, whole)) == math.prod(shape) and len(whole) == max(1, len(rows))
    assert counter.get_total_flops() == sum(values.flops(*own) for own in whole) > 0
    assert registry.find("adam").hyperparameters().flops(*shape) == 0


@pytest.fixture
def parsed(monkeypatch):
    def parse(words: str, devices_of_job: int = 1):
        monkeypatch.setenv("WORLD_SIZE", str(devices_of_job))
        base = "--device cpu --plan-device h100 --bf16 --micro-batch-size 1 --model moe-10b-hybrid"
        return arguments.parse([*base.split(), *words.split(), "--dry-run"])

    return parse


def test_whole_matrices_do_not_depend_on_the_tensor_parallel_size(parsed):
    one, two = (
        blocks(parsed(f"--optimizer muon --tensor-model-parallel-size {size} {more}", size))
        for size, more in ((1, ""), (2, "--sequence-parallel"))
    )
    matrices = [
        {own.name: own.matrices for block in model for own in block.parameters if not own.is_expert}
        for model in (one, two)
    ]
    assert matrices[0] == matrices[1]
    assert {own.cut for block in two for own in block.parameters if own.role == "qkv"} == {2}
    blockwise = blocks(
        parsed("--optimizer muon --muon-tp-mode blockwise --tensor-model-parallel-size 2 --sequence-parallel", 2)
    )
    assert {own.cut for block in blockwise for own in block.parameters} == {1}


def test_the_update_takes_longer_with_matrix_products(parsed):
    def update(words: str) -> float:
        args = parsed(words, 8)
        costs = CostModel(args, H100)
        return sum(own.update for own in costs.blocks(blocks(args)))

    adam, muon = update("--optimizer adam"), update("--optimizer muon")
    assert muon > 1.2 * adam
    more = update("--optimizer muon --muon-num-ns-steps 10")
    assert more - adam == pytest.approx(2 * (muon - adam))
    # Layer-wise, each rank orthogonalizes its own matrices.
    assert update("--optimizer muon --use-distributed-optimizer") < 0.2 * muon
    slow = update("--optimizer muon --muon-fp32-matmul-prec high")
    assert slow - adam == pytest.approx((muon - adam) * H100.speed("bf16") / H100.speed("tf32"))
