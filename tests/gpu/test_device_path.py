# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""What differs on a GPU: storage that is switched under queued work, host copies, the precision of products.

`pytest -m gpu tests/gpu`; without a GPU every test is skipped.
"""

from types import SimpleNamespace

import pytest
import torch

from megatron_async.optim.algorithms.muon import orthogonalize
from megatron_async.pipeline.gradients import GradientGenerations
from megatron_async.pipeline.pointers import ParameterPointer
from megatron_async.pipeline.weights import WeightVersions
from megatron_async.platform.host import HostValues

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no usable GPU"),
]

DEVICE = torch.device("cuda")
LONG = 500_000_000
"""Cycles of a busy wait: a quarter of a second at 2 GHz."""


def busy_wait() -> torch.cuda.Event:
    """Keep the device busy; the event passes when it is done."""
    torch.cuda._sleep(LONG)
    done = torch.cuda.Event()
    done.record()
    return done


def test_work_in_the_queue_keeps_the_version_it_was_given():
    weight = torch.nn.Parameter(torch.ones(1024, device=DEVICE))
    versions = WeightVersions([ParameterPointer(weight)], limit=2)
    busy = busy_wait()
    old = weight * 2.0  # queued behind the wait
    versions.open_next()
    with torch.no_grad():
        weight.add_(1.0)
    versions.publish_next(1)
    new = weight * 2.0
    assert not busy.query(), "switching versions waited for the device"
    versions.use(0)
    assert old.eq(2.0).all() and new.eq(4.0).all() and weight.eq(1.0).all()


def test_backward_uses_the_version_in_use():
    weight = torch.nn.Parameter(torch.full((8,), 2.0, device=DEVICE))
    versions = WeightVersions([ParameterPointer(weight)], limit=2)
    source = torch.ones(8, device=DEVICE, requires_grad=True)
    output = (source * weight).sum()
    versions.open_next()
    with torch.no_grad(), torch.autograd.grad_mode._unsafe_preserve_version_counter((weight,)):
        weight.mul_(5.0)
    versions.publish_next(1)
    versions.use(0)
    output.backward()
    assert source.grad is not None and source.grad.eq(2.0).all()


def test_generations_take_turns_without_copies():
    param = torch.nn.Parameter(torch.zeros(6, device=DEVICE))
    flat = torch.zeros(8, device=DEVICE)
    param.main_grad = flat[:6]
    buffer = SimpleNamespace(params=[param], grad_data=flat, buckets=[SimpleNamespace(grad_data=flat)])
    generations = GradientGenerations(SimpleNamespace(buffers=[buffer], expert_parallel_buffers=[]))
    for batch, value in enumerate((1.0, 2.0)):
        generations.use(batch)
        param.main_grad.add_(value)
    assert generations.flat(0)[0].data[:6].eq(1.0).all() and generations.flat(1)[0].data[:6].eq(2.0).all()
    generations.clear(0)
    assert generations.flat(0)[0].data.eq(0.0).all() and generations.flat(1)[0].data[:6].eq(2.0).all()


def test_host_values_do_not_wait_for_the_device():
    values = torch.arange(3.0, device=DEVICE)
    busy = busy_wait()
    host = HostValues(values * 2.0)
    assert not busy.query() and not host.ready, "copying waited for the device"
    later = busy_wait()
    assert host.read() == [0.0, 2.0, 4.0]
    assert not later.query(), "reading waited for work queued after the copy"


@pytest.mark.parametrize(("precision", "exact"), [("highest", True), ("medium", False)])
def test_newton_schulz_follows_the_matmul_precision(precision, exact):
    """fp32 in and out; with "medium" the products may run in bf16, with "highest" they agree with the CPU's."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(256, 512, generator=generator)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        result = orthogonalize(matrix.to(DEVICE))
    finally:
        torch.set_float32_matmul_precision(before)
    assert result.dtype == torch.float32
    off = (result.cpu() - orthogonalize(matrix)).norm() / result.norm()
    assert off < (1e-4 if exact else 0.05)
