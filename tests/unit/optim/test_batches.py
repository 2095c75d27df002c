# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Matrices of equal shape are stepped together: the same bits, one set of kernels, bounded memory."""

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_async.optim.algorithms import batches as batches_module
from megatron_async.optim.algorithms.batches import batches
from megatron_async.optim.algorithms.muon import SAME_BITS, orthogonalize, update_scale
from megatron_async.optim.algorithms.normuon import align_rms
from megatron_async.optim.layout import LAYOUT, Layout
from megatron_async.optim.registry import find

MATRIX = ["muon", "normuon", "adamuon", "mars-m"]
SIDES = [1, 2, 3, 5, 8, 9, SAME_BITS - 1, SAME_BITS, 16, 17, 31, 32, 48, 64]


def parameter(value: Tensor, layout: Layout) -> Parameter:
    param = Parameter(value.clone())
    setattr(param, LAYOUT, layout)
    return param


def train(name: str, params: Sequence[Parameter], grads: Sequence[Sequence[Tensor]], precision: str) -> None:
    optimizer = find(name).build(list(params), lr=0.1, fp32_matmul_prec=precision)
    for step in grads:
        for param, grad in zip(params, step, strict=True):
            param.grad = grad.clone()
        optimizer.step()


def random_weights(generator: torch.Generator) -> list[tuple[Tensor, Layout]]:
    """Matrices of a few shapes, shuffled: whole ones, fused ones, and stacks."""

    def draw(end: int) -> int:
        return int(torch.randint(end, (), generator=generator))

    kinds = []
    for _ in range(3):
        rows, columns = SIDES[draw(len(SIDES))], SIDES[draw(len(SIDES))]
        fused = Layout(rows=(2 * rows, rows)) if draw(3) == 0 else Layout()
        shape = (2 * 3 * rows if fused.rows else rows, columns)
        kinds += [(shape, fused)] * (1 + draw(5))
        if not fused.rows and draw(2):
            kinds += [((1 + draw(4), *shape), fused)] * (1 + draw(2))
    order = torch.randperm(len(kinds), generator=generator).tolist()
    return [(torch.randn(kinds[i][0], generator=generator), kinds[i][1]) for i in order]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("precision", ["highest", "medium"])
@pytest.mark.parametrize("name", MATRIX)
def test_a_batch_has_the_weights_and_the_state_of_its_matrices(
    name: str, precision: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit in fp32; products in bf16 may take other kernels. Batches of all sizes, cut anywhere."""
    generator = torch.Generator().manual_seed(seed)
    weights = random_weights(generator)
    grads = [[torch.randn(value.shape, generator=generator) for value, _ in weights] for _ in range(2)]
    monkeypatch.setattr(batches_module, "CPU_BATCH", 1 << (9 + 2 * seed))
    together = [parameter(*weight) for weight in weights]
    train(name, together, grads, precision)
    for position, (value, layout) in enumerate(weights):
        # A stack is its matrices, each in an optimizer of its own.
        alone = value.unbind(0) if value.ndim == 3 else (value,)
        results = []
        for number, matrix in enumerate(alone):
            param = parameter(matrix, layout)
            own = [step[position][number] if value.ndim == 3 else step[position] for step in grads]
            train(name, [param], [[grad] for grad in own], precision)
            results.append(param.detach())
        expected = torch.stack(results).view(value.shape)
        if precision == "highest":
            assert torch.equal(together[position].detach(), expected), (value.shape, layout)
        else:
            torch.testing.assert_close(together[position].detach(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("shape", [(16, 40), (40, 16), (5, 9)])
@pytest.mark.parametrize("name", MATRIX)
def test_a_batch_has_the_bits_of_plain_operations_on_each_matrix(name: str, shape: tuple[int, int]) -> None:
    """The second moment's means are sums in the order of memory, transposed for tall matrices."""
    starts, grads = torch.randn(3, *shape), torch.randn(3, *shape)
    params = [parameter(start, Layout()) for start in starts]
    train(name, params, [grads], "highest")
    for start, grad, param in zip(starts, grads, params, strict=True):
        if name == "mars-m":
            corrected = torch.add(grad, grad, alpha=0.025 * 0.95 / (1 - 0.95))
            momentum = torch.zeros(shape).lerp_(corrected / corrected.square().sum().sqrt().clamp_min(1.0), 1 - 0.95)
        else:
            momentum = torch.zeros(shape).lerp_(grad, 1 - 0.95)
        direction = {"normuon": grad.lerp(momentum, 0.95), "adamuon": momentum.sign()}.get(name, momentum)
        update = orthogonalize(direction)
        if name in ("muon", "mars-m"):
            update = update * update_scale(*shape)
        else:
            squares = update.square() if name == "adamuon" else update.square().mean(dim=-1, keepdim=True)
            even = update / (torch.zeros_like(squares).lerp_(squares, 1 - 0.95).sqrt() + 1e-8)
            update = align_rms(even, even.square().mean())
        expected = start.add(start, alpha=-0.1 * 0.1).add_(update, alpha=-0.1)
        assert torch.equal(param.detach(), expected)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("count", [1, 7])
def test_newton_schulz_is_the_same_in_a_batch(count: int, side: int) -> None:
    """To rounding: some processors multiply batches in another order. On others the bits are the same."""
    for other in SIDES:
        x = torch.randn(count, side, other)
        assert_close(orthogonalize(x), torch.stack([orthogonalize(matrix) for matrix in x]), rtol=1e-5, atol=2e-6)


class Watch(TorchDispatchMode):
    """Counts operations, and the bytes of tensors that are made and still alive.

    A foreach operation counts once. On a GPU it is fused if its lists have equal strides: `fused`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.held = self.peak = 0
        self.fused = True
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        old = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        if "_foreach" in func.name():
            lists = [value for value in args if isinstance(value, list | tuple)]
            self.fused &= len({tuple(x.stride() for x in values) for values in lists}) == 1
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and (storage := x.untyped_storage())._cdata not in old | self._known:
                self._known.add(storage._cdata)
                self.held += storage.nbytes()
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.held)
        return result

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.held -= size


def watched_step(name: str, count: int, shape: tuple[int, int], layout: Layout) -> Watch:
    params = [parameter(torch.randn(shape), layout) for _ in range(count)]
    optimizer = find(name).build(params, lr=0.1, fp32_matmul_prec="highest")
    for _ in range(2):
        for param in params:
            param.grad = torch.randn(shape)
        with Watch() as watch:  # the second step is counted: the first one allocates state
            optimizer.step()
    return watch


@pytest.mark.parametrize("layout", [Layout(), Layout(rows=(24, 12, 12))], ids=["whole", "fused"])
@pytest.mark.parametrize("name", MATRIX)
def test_a_batch_takes_the_operations_of_one_matrix(name: str, layout: Layout) -> None:
    for shape in ((48, 24), (48, 60)):
        one, many = (watched_step(name, count, shape, layout) for count in (1, 64))
        # A matrix adds the view of its parameter.
        assert many.operations - one.operations == 63 and one.operations < 400
        assert one.fused and many.fused


@pytest.mark.parametrize("layout", [Layout(), Layout(rows=(24, 12, 12))], ids=["whole", "fused"])
@pytest.mark.parametrize("name", MATRIX)
def test_memory_does_not_grow_with_the_number_of_matrices(
    name: str, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 8 * 48 * 48
    monkeypatch.setattr(batches_module, "CPU_BATCH", size)
    peaks = [watched_step(name, count, (48, 48), layout).peak for count in (8, 64)]
    assert peaks[1] == peaks[0]
    assert peaks[0] == pytest.approx((4 if layout.rows else 6) * 4 * size, rel=1e-3)


def test_batches_are_alike_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches_module, "CPU_BATCH", 100)
    fused = Layout(rows=(2, 2))
    shapes = [((4, 8), Layout()), ((3, 4, 8), Layout()), ((4, 8), fused), ((20, 20), Layout()), ((4, 8), Layout())]
    params = [parameter(torch.randn(shape), layout) for shape, layout in shapes]
    grads = [torch.randn(param.shape) for param in params]
    found = list(batches(params, grads, {"buffer": [grad + 1 for grad in grads]}))
    assert [(len(batch.weights), tuple(batch.weights[0].shape), batch.layout) for batch in found] == [
        (3, (4, 8), Layout()),
        (2, (4, 8), Layout()),
        (1, (4, 8), fused),
        (1, (20, 20), Layout()),
    ]
    for batch in found:
        for grad, buffer in zip(batch.grads, batch.state["buffer"], strict=True):
            assert torch.equal(grad + 1, buffer)
    found[0].weights[1].zero_()
    assert not params[1][0].any() and params[1][1].any()
