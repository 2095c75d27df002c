# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Weight versions by pointer: the scalar series, what is alive, and what autograd sees."""

import pytest
import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from megatron_async.pipeline.pointers import BufferPointer, ParameterPointer
from megatron_async.pipeline.weights import WeightVersions
from megatron_async.schedules.phases import Phases


def series(*, batches: int, delay: int = 1, strength: float = 0.0, phases: Phases | None = None) -> list[float]:
    """W_0, W_1, ... for the loss w^2 / 2 and SGD with rate 0.1, through the versions that the product keeps."""
    param = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    versions = WeightVersions([ParameterPointer(param)], limit=delay + 1)
    phases = phases or Phases(0, batches)
    rule = phases.versions(delay)
    trajectory, previous = [1.0], None
    for batch in range(batches):
        versions.use(rule(batch))
        (param**2 / 2).backward()
        gradient, param.grad = param.grad.clone(), None
        versions.open_next()
        update = 0.1 * gradient
        with torch.no_grad():
            param -= update
            if strength and phases.corrected(batch):
                param -= strength * (update - previous)
        versions.publish_next(batch + 1)
        previous = update
        trajectory.append(param.item())
    return trajectory


def test_the_scalar_series():
    """loss w^2 / 2, rate 0.1, from 1: the numbers that define a delay of one."""
    assert series(batches=5) == pytest.approx([1, 0.9, 0.8, 0.71, 0.63, 0.559], abs=1e-15)


def test_the_scalar_series_with_error_feedback():
    """u = 0.1, 0.1, 0.09, ...: W_2 = 0.9 - 0.1 - 0, W_3 = 0.8 - 0.09 - (0.09 - 0.1) = 0.72, and on."""
    expected, updates, weights = [1.0], [], [1.0]
    for batch in range(6):
        update = 0.1 * weights[max(batch - 1, 0)]
        correction = update - updates[-1] if batch else 0.0
        weights.append(weights[-1] - update - correction)
        updates.append(update)
        expected = weights
    assert series(batches=6, strength=1.0) == pytest.approx(expected, abs=1e-15)
    assert expected[2:4] == pytest.approx([0.8, 0.72])


def test_a_synchronous_start_and_cooldown():
    """Batches 0, 1 are fresh; batch 2, the first delayed one, still is, batch 3 uses W_2; batch 5 is fresh again."""
    weights = [1.0]
    for version in (0, 1, 2, 2, 3, 5, 6):
        weights.append(weights[-1] - 0.1 * weights[version])
    assert series(batches=7, phases=Phases(2, 5)) == pytest.approx(weights, abs=1e-15)


@pytest.mark.parametrize("delay", [0, 1, 2, 5])
def test_delays_and_versions_alive(delay):
    weights = [1.0]
    for batch in range(8):
        weights.append(weights[-1] - 0.1 * weights[max(batch - delay, 0)])
    assert series(batches=8, delay=delay) == pytest.approx(weights, abs=1e-15)


def test_at_most_two_versions_and_no_copy_to_switch():
    param = torch.nn.Parameter(torch.zeros(3))
    versions = WeightVersions([ParameterPointer(param)], limit=2)
    seen = set()
    for version in range(1, 6):
        versions.open_next()
        param.data.fill_(version)
        versions.publish_next(version)
        assert versions.alive == ((0, 1) if version == 1 else (version - 1, version))
        for alive in versions.alive:
            versions.use(alive)
            assert param.tolist() == [alive] * 3
            seen.add(param.data_ptr())
    assert len(seen) == 2
    with pytest.raises(AssertionError, match="version 1 is not alive"):
        versions.use(1)


def test_a_backward_sees_the_version_of_its_forward():
    """An update between forward and backward neither changes the gradient nor trips autograd's version check."""
    linear = torch.nn.Linear(4, 4, bias=False)
    x = torch.randn(2, 4, requires_grad=True)
    versions = WeightVersions([ParameterPointer(param) for param in linear.parameters()], limit=2)
    expected = torch.autograd.grad(linear(x).square().sum(), x)[0]
    output = linear(x).square().sum()
    versions.open_next()
    with torch.no_grad(), _unsafe_preserve_version_counter(tuple(linear.parameters())):
        linear.weight.mul_(3.0)
    versions.publish_next(1)
    versions.use(0)
    output.backward()
    torch.testing.assert_close(x.grad, expected, rtol=0, atol=0)


def test_buffers_are_versioned_too():
    module = torch.nn.Module()
    module.register_buffer("expert_bias", torch.zeros(2))
    versions = WeightVersions([BufferPointer(module, "expert_bias")], limit=2)
    versions.open_next()
    module.expert_bias.add_(1.0)
    versions.publish_next(1)
    assert module.expert_bias.tolist() == [1.0, 1.0]
    versions.use(0)
    assert module.expert_bias.tolist() == [0.0, 0.0]
