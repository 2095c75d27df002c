# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Fused, stacked and cut weights: the update is that of the separate, whole matrices."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_async.optim import layout as layout_module
from megatron_async.optim.algorithms import Mars, Muon
from megatron_async.optim.layout import LAYOUT, Layout
from megatron_async.optim.param_groups import layouts
from megatron_async.optim.registry import find

MATRIX = ["muon", "normuon", "adamuon", "mars-m"]
STEPS = 3


class Ranks:
    """Two ranks of a process group as threads of this process."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._barrier = threading.Barrier(size)
        self._slots: list[Any] = [None] * size
        self._local = threading.local()
        self.issued: list[list[tuple[str, torch.Size]]] = [[] for _ in range(size)]
        """Collectives of each rank, in order."""

    def rank(self) -> int:
        return int(self._local.rank)

    def size(self) -> int:
        return self._size

    def run(self, function: Any, arguments: Sequence[Any]) -> list[Any]:
        def body(rank: int) -> Any:
            self._local.rank = rank
            return function(arguments[rank])

        with ThreadPoolExecutor(self._size) as pool:
            return list(pool.map(body, range(self._size)))

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self._slots[self.rank()] = tensor.clone()
        self._barrier.wait(timeout=30)
        everything = list(self._slots)
        self._barrier.wait(timeout=30)
        return everything

    def all_gather(self, parts: Tensor, tensor: Tensor) -> None:
        self.issued[self.rank()].append(("gather", tensor.shape))
        parts.copy_(torch.cat(self._exchange(tensor)))  # one behind the other, as gloo wants them

    def all_reduce(self, tensor: Tensor) -> None:
        self.issued[self.rank()].append(("reduce", tensor.shape))
        tensor.copy_(torch.stack(self._exchange(tensor)).sum(dim=0))


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    group = Ranks(2)
    monkeypatch.setattr(
        layout_module.dist, "all_gather_into_tensor", lambda parts, x, group: group.all_gather(parts, x)
    )
    monkeypatch.setattr(layout_module.dist, "all_reduce", lambda x, group: group.all_reduce(x))
    return group


def gradients(shape: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(shape, generator=generator) for _ in range(STEPS)]


def step(name: str, start: Tensor, grads: Sequence[Tensor], layout: Layout) -> Tensor:
    """The weights after some steps."""
    param = Parameter(start.clone())
    setattr(param, LAYOUT, layout)
    # Full precision: in bf16 a norm summed in another order may round differently.
    precise = {"fp32_matmul_prec": "highest"} if name in MATRIX else {}
    optimizer = find(name).build([param], lr=0.1, **precise)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return param.detach()


@pytest.mark.parametrize("name", MATRIX)
@pytest.mark.parametrize(
    ("groups", "blocks"),
    [(2, (16, 4, 4)), (2, (16, 16, 4, 4)), (1, (8, 8, 16, 16, 4, 4))],
    ids=["attention", "attention with gate", "delta net"],
)
def test_a_fused_projection_is_its_separate_matrices(name: str, groups: int, blocks: tuple[int, ...]) -> None:
    """8 query heads in 2 groups, head size 4: rows q (g) k v of group 0, then of group 1; q k v g beta alpha once."""
    rows = groups * sum(blocks)
    start, grads = torch.randn(rows, 12), gradients((rows, 12))
    grads = [grad * torch.linspace(1, 100, rows)[:, None] for grad in grads]
    fused = step(name, start, grads, Layout(rows=blocks))

    def part(x: Tensor, position: int) -> Tensor:
        return torch.cat([group.split(list(blocks))[position] for group in x.split(sum(blocks))])

    for position in range(len(blocks)):
        alone = step(name, part(start, position), [part(grad, position) for grad in grads], Layout())
        if name == "mars-m":
            # One norm clips the gradient of the whole weight: the direction differs a little, the size does not.
            torch.testing.assert_close(
                (part(fused - start, position)).norm(), (alone - part(start, position)).norm(), rtol=0.1, atol=0
            )
        else:
            torch.testing.assert_close(part(fused, position), alone, rtol=1e-5, atol=1e-6)


def test_a_loud_block_does_not_drown_the_others() -> None:
    start = torch.zeros(48, 16)
    grad = torch.randn(48, 16)
    grad[16:32] *= 100
    separate = step("muon", start, [grad], Layout(rows=(16, 16, 16)))
    fused = step("muon", start, [grad], Layout())
    sizes = [[float(block.norm()) for block in x.split(16)] for x in (separate, fused)]
    assert max(sizes[0]) < 1.2 * min(sizes[0])
    assert max(sizes[1]) > 3 * min(sizes[1])


@pytest.mark.parametrize("name", MATRIX)
def test_a_stack_of_experts_is_its_matrices(name: str) -> None:
    """Also with gradients scaled 1, 10, 100, and none at all for an expert that got no token."""
    start, grads = torch.randn(4, 16, 12), gradients((4, 16, 12))
    grads = [grad * torch.tensor([1.0, 10.0, 100.0, 0.0])[:, None, None] for grad in grads]
    stacked = step(name, start, grads, Layout())
    for expert in range(4):
        alone = step(name, start[expert], [grad[expert] for grad in grads], Layout())
        torch.testing.assert_close(stacked[expert], alone, rtol=1e-5, atol=1e-6)
    decay = (1 - 0.1 * 0.1) ** STEPS
    torch.testing.assert_close(stacked[3], start[3] * decay, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", [*MATRIX, "mars"])
@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
@pytest.mark.parametrize("shape", [(16, 12), (12, 16), (64, 16)])
def test_a_cut_matrix_takes_the_step_of_the_whole(ranks: Ranks, name: str, dim: int, shape: tuple[int, int]) -> None:
    start, grads = torch.randn(shape), gradients(shape)
    # Two magnitudes: a rank that scales by its own would be noticed.
    grads = [torch.cat([grad.chunk(2, dim)[0], 100 * grad.chunk(2, dim)[1]], dim) for grad in grads]
    whole = step(name, start, grads, Layout())
    layout = Layout(shards=ranks, dim=dim)  # type: ignore[arg-type]
    parts = ranks.run(
        lambda rank: step(name, start.chunk(2, dim)[rank], [grad.chunk(2, dim)[rank] for grad in grads], layout),
        [0, 1],
    )
    torch.testing.assert_close(torch.cat(parts, dim), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["muon", "normuon", "adamuon"])
def test_a_cut_fused_projection_takes_the_step_of_the_whole(ranks: Ranks, name: str) -> None:
    """Each rank holds whole groups: one of two."""
    blocks, shape = (8, 4, 4), (32, 12)
    start, grads = torch.randn(shape), gradients(shape)
    whole = step(name, start, grads, Layout(rows=blocks))
    layout = Layout(rows=blocks, shards=ranks, dim=0)  # type: ignore[arg-type]
    parts = ranks.run(
        lambda rank: step(name, start.chunk(2)[rank], [grad.chunk(2)[rank] for grad in grads], layout), [0, 1]
    )
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "reductions"), [("muon", 0), ("normuon", 2), ("adamuon", 1), ("mars-m", 1)], ids=MATRIX
)
def test_one_collective_serves_all_cut_matrices_of_a_shape(ranks: Ranks, name: str, reductions: int) -> None:
    """Both ranks issue them in the same order; matrices that are whole on a rank need none."""
    shapes = [(16, 12), (24, 16), (16, 12), (24, 16), (16, 12)]
    cut = Layout(shards=ranks, dim=1)  # type: ignore[arg-type]
    starts = [torch.randn(shape) for shape in shapes]
    grads = [torch.randn(shape) for shape in shapes]

    def step_all(rank: int) -> list[Tensor]:
        params = [Parameter(start.chunk(2, 1)[rank].clone()) for start in starts]
        whole = Parameter(torch.ones(16, 6))
        for param, layout, grad in zip(
            [*params, whole], [cut] * 5 + [Layout()], [*grads, torch.ones(16, 12)], strict=True
        ):
            setattr(param, LAYOUT, layout)
            param.grad = grad.chunk(2, 1)[rank].clone()
        find(name).build([*params, whole], lr=0.1, fp32_matmul_prec="highest").step()
        return [param.detach() for param in params]

    parts = ranks.run(step_all, [0, 1])
    assert ranks.issued[0] == ranks.issued[1]
    gathered = [shape for kind, shape in ranks.issued[0] if kind == "gather"]
    assert gathered == [(3, 16, 6), (2, 24, 8)] and len(ranks.issued[0]) == 2 * (1 + reductions)
    for start, grad, *halves in zip(starts, grads, *parts, strict=True):
        expected = step(name, start, [grad], Layout())
        torch.testing.assert_close(torch.cat(halves, 1), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gather", [True, False], ids=["duplicated", "blockwise"])
def test_blockwise_takes_each_shard_for_a_matrix(ranks: Ranks, gather: bool) -> None:
    model = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"linear_fc2": torch.nn.Linear(12, 16)})})
    ((name, param, layout),) = layouts(
        model, None, lambda param: (ranks, 1), ["matrix"], split_fused=True, split_gate_up=False, gather=gather
    )
    assert (name, param.shape) == ("mlp.linear_fc2.weight", (16, 12))
    assert layout == (Layout(shards=ranks, dim=1) if gather else Layout())  # type: ignore[arg-type]


@pytest.mark.parametrize("split", [True, False])
def test_gate_and_up_projection_on_demand(ranks: Ranks, split: bool) -> None:
    """Two tensor-parallel ranks hold half of both matrices each, gate first."""
    mlp = torch.nn.ModuleDict({"linear_fc1": torch.nn.Linear(12, 16), "linear_fc2": torch.nn.Linear(8, 12)})
    config = SimpleNamespace(gated_linear_unit=True)
    found = layouts(
        torch.nn.ModuleDict({"mlp": mlp}),
        config,
        lambda param: (ranks, 0) if len(param) == 16 else None,
        ["matrix"],
        split_fused=False,
        split_gate_up=split,
        gather=True,
    )
    layout, other = (layout for _, _, layout in found)
    assert other == Layout() and layout.rows == ((8, 8) if split else ())
    start, grads = torch.randn(32, 12), gradients((32, 12))
    grads = [grad * torch.linspace(1, 100, 32)[:, None] for grad in grads]

    def cut(x: Tensor, rank: int) -> Tensor:
        return torch.cat([half.chunk(2)[rank] for half in x.chunk(2)])

    parts = ranks.run(lambda rank: step("muon", cut(start, rank), [cut(grad, rank) for grad in grads], layout), [0, 1])
    whole = torch.cat([torch.cat([part.chunk(2)[half] for part in parts]) for half in (0, 1)])
    apart = [step("muon", start.chunk(2)[half], [grad.chunk(2)[half] for grad in grads], Layout()) for half in (0, 1)]
    assert torch.allclose(whole, torch.cat(apart), rtol=1e-5, atol=1e-6) == split
    if not split:
        torch.testing.assert_close(whole, step("muon", start, grads, Layout()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1e6])
@pytest.mark.parametrize("layout", [Layout(), Layout(rows=(8, 4, 4))], ids=["whole", "fused"])
def test_the_step_does_not_depend_on_the_scale_of_the_gradient(scale: float, layout: Layout) -> None:
    start, grads = torch.zeros(32, 12), gradients((32, 12))
    ordinary = step("muon", start, grads, layout)
    scaled = step("muon", start, [grad * scale for grad in grads], layout)
    torch.testing.assert_close(scaled, ordinary, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("mode", "factor", "expected"),
    [
        ("spectral", None, 0.2 * 8),
        ("spectral", 0.4, 0.4 * 8),
        ("shape_scaling", None, 2.0),
        ("shape_scaling", 0.5, 1.0),
    ],
)
def test_the_extra_scale_factor(mode: str, factor: float | None, expected: float) -> None:
    optimizer = Muon([Parameter(torch.zeros(64, 16))], scale_mode=mode, extra_scale_factor=factor)
    assert optimizer.scale(64, 16) == pytest.approx(expected)


def test_layouts_that_do_not_fit_are_refused() -> None:
    Layout(rows=(8, 2, 2)).check("w", (24, 8))
    with pytest.raises(ValueError, match=r"18 rows.*not a multiple.*12 rows.*--optimizer-for"):
        Layout(rows=(8, 2, 2)).check("w", (18, 8))
    with pytest.raises(ValueError, match="a stack of matrices"):
        Layout(rows=(8, 2, 2)).check("w", (3, 24, 8))


def test_mars_needs_no_layout() -> None:
    param = Parameter(torch.ones(3, 4))
    param.grad = torch.ones(3, 4)
    Mars([param], lr=0.1).step()
    assert torch.isfinite(param).all()
