# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Trial updates, staleness, sizes of updates, Adam with a delayed first moment."""

import math

import pytest
import torch
from torch.nn import Parameter

from megatron_async.optim.corrections import ErrorFeedback
from megatron_async.optim.registry import OptimizerSpec, names, specs
from megatron_async.optim.statistics import UpdateStatistics
from megatron_async.optim.step import MasterStep, Piece, StepContext, parts
from megatron_async.reference.ablations import DelayedFirstMomentStep
from megatron_async.reference.staleness import compare, trial_update
from tests.standins import FusedAdam


@pytest.mark.parametrize("info", specs(), ids=names())
def test_a_trial_changes_nothing_and_tells_the_next_update(info: OptimizerSpec) -> None:
    param = Parameter(torch.randn(6, 10))
    optimizer = info.build([param], lr=0.01)
    step = MasterStep([optimizer], parts(correction=ErrorFeedback([optimizer], 1.0)))
    for batch in range(2):
        param.grad = torch.randn_like(param)
        step(StepContext(batch))
    before = param.detach().clone()
    state = {name: value.clone() for name, value in optimizer.state[param].items() if torch.is_tensor(value)}
    param.grad = torch.randn_like(param)
    (update,) = trial_update([optimizer])
    assert torch.equal(param, before)
    for name, value in state.items():
        assert torch.equal(optimizer.state[param][name], value), name
    optimizer.step()
    assert torch.equal(before - param.detach(), update)


def test_a_trial_is_no_step_of_an_optimizer_that_counts_per_group() -> None:
    """As Transformer Engine's FusedAdam does."""
    params = [Parameter(torch.ones(3)) for _ in range(2)]
    optimizers = [FusedAdam([param]) for param in params]
    for number in range(3):
        for param, optimizer in zip(params, optimizers, strict=True):
            param.grad = torch.tensor([1.0, -2.0, number])
            if param is params[0]:
                trial_update([optimizer])
            optimizer.step()
    assert torch.equal(*params)


def test_staleness_of_known_updates() -> None:
    fresh = [torch.tensor([3.0, 0.0]), torch.tensor([4.0])]
    stale = [torch.tensor([0.0, 3.0]), torch.tensor([4.0])]
    found = compare(stale, fresh)
    assert found["stale_update_cosine"] == pytest.approx(16 / 25)
    assert found["stale_update_relative_error"] == pytest.approx(math.sqrt(18) / 5)
    assert math.isnan(compare(stale, [torch.zeros(2), torch.zeros(1)])["stale_update_cosine"])


def test_sizes_of_updates_by_role() -> None:
    """SGD at rate 0.1 with known gradients; error feedback adds the change of the update."""
    matrix, norm = Parameter(torch.ones(2, 3)), Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([matrix, norm], lr=0.1)
    statistics = UpdateStatistics(2, {matrix: "matrix", norm: "norm"}, None, torch.device("cpu"))
    step = MasterStep([optimizer], parts(correction=ErrorFeedback([optimizer], 0.5), statistics=statistics))
    for batch, size in enumerate((1.0, 3.0)):
        matrix.grad, norm.grad = torch.full((2, 3), size), torch.full((4,), 2 * size)
        step(StepContext(batch, corrected=batch == 1))
    pending = statistics.reduce(1)
    assert pending.ready
    values = pending.read()
    # u = 0.3 and 0.6, corrections 0.5 (0.3 - 0.1) and 0.5 (0.6 - 0.2)
    assert values["update_rms"] == pytest.approx({"matrix": 0.4, "norm": 0.8}, rel=1e-5)
    assert values["correction_rms"] == pytest.approx(math.sqrt((6 * 0.01 + 4 * 0.04) / 10), rel=1e-5)
    assert statistics.reduce(3).read()["update_rms"] == {}


def test_a_delay_of_the_first_moment_alone() -> None:
    lr, decay, (beta1, beta2), eps = 0.1, 0.2, (0.9, 0.95), 1e-8
    param = Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizer = torch.optim.AdamW([param], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay)
    ablation = DelayedFirstMomentStep()
    step_masters = MasterStep([optimizer], parts(optimizer_step=ablation))
    weight, m, v = 1.0, 0.0, 0.0
    for step, (stale, new) in enumerate([(0.5, 0.7), (-0.2, 0.1), (0.9, -0.4)], start=1):
        param.grad = torch.tensor([stale], dtype=torch.float64)
        ablation.fresh = {param: torch.tensor([new], dtype=torch.float64)}
        step_masters(StepContext(step))
        m, v = beta1 * m + (1 - beta1) * stale, beta2 * v + (1 - beta2) * new**2
        corrected = m / (1 - beta1**step) / (math.sqrt(v / (1 - beta2**step)) + eps)
        weight = weight * (1 - lr * decay) - lr * corrected
        assert param.item() == pytest.approx(weight, rel=1e-12)


def test_the_first_moment_is_adams() -> None:
    with pytest.raises(ValueError, match="AdamW, not SGD"):
        params = [Parameter(torch.ones(1))]
        DelayedFirstMomentStep()(Piece(torch.optim.SGD(params), list(params)), StepContext(0))
