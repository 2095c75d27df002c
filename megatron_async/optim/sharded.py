# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The matrix optimizers on weights that are fused, stacked or cut into tensor-parallel shards.

A weight's `Layout` says which of its rows form a matrix of their own; every such matrix is orthogonalized by itself,
whole: its shards are gathered first, so that the update does not depend on the tensor-parallel size. What the
optimizers reduce over a matrix (largest magnitude, norms, means) is reduced over its shards too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from emerging_optimizers.orthogonalized_optimizers import OrthogonalizedOptimizer
from torch import Tensor

from megatron_async.optim.algorithms import AdaMuon, Mars, MarsM, Muon, NorMuon
from megatron_async.optim.algorithms.muon import RMS
from megatron_async.optim.algorithms.state import Shape

LAYOUT = "matrix_layout"
"""Attribute of a parameter that holds its `Layout`; the fp32 master copy of a parameter needs it too."""

TensorParallelMode = Literal["duplicated", "blockwise"]


@dataclass(frozen=True, slots=True)
class Layout:
    """The matrices in a weight of shape (rows, columns), or (stack, rows, columns).

    Attributes:
        rows: rows of each fused matrix in one repetition, on this rank; empty for a weight that is one matrix. A
            weight whose rows are q k v q k v has two repetitions, and its q is one matrix of both parts.
        shards: process group over which the weight is cut, None where this rank holds all of it.
        dim: axis of the cut, 0 for rows (outputs) and 1 for columns (inputs).
    """

    rows: tuple[int, ...] = ()
    shards: dist.ProcessGroup | None = None
    dim: int = 0

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Views of a tensor that has the weight's rows; all axes but the last one are rows, or a stack and rows."""
        if not self.rows:
            return (x,)
        return tuple(x.view(-1, sum(self.rows), x.size(-1)).split(list(self.rows), dim=1))


WHOLE = Layout()


def check_layout(name: str, shape: tuple[int, ...], layout: Layout) -> None:
    """Refuse a layout that does not fit a weight.

    Raises:
        ValueError: the rows do not repeat a whole number of times, or a stack of matrices is fused or cut.
    """
    if len(shape) == 3 and (layout.rows or layout.shards is not None):
        raise ValueError(f"{name}: a stack of matrices, shape {shape}, cannot be cut over tensor-parallel ranks.")
    if layout.rows and shape[0] % sum(layout.rows):
        raise ValueError(
            f"{name}: {shape[0]} rows on this rank are not a multiple of its fused blocks {layout.rows} = "
            f"{sum(layout.rows)} rows. Use a tensor-parallel size that divides the number of key/value groups, or "
            "send the fused projection to Adam (--optimizer-for)."
        )


def layout_of(param: Tensor) -> Layout:
    """The layout of a parameter. Every parameter of a matrix optimizer must have got one: guessing could be wrong."""
    layout = getattr(param, LAYOUT, None)
    assert isinstance(layout, Layout), f"a parameter of shape {tuple(param.shape)} has no layout"
    return layout


class _WholeMatrices(OrthogonalizedOptimizer):
    """The end of the chain of `orthogonalize` calls: block by block, each gathered over its shards."""

    tp_mode: TensorParallelMode = "duplicated"

    def orthogonalize(self, p: Tensor, grad: Tensor, **kwargs: Any) -> Tensor:
        layout = layout_of(p)
        if not layout.rows:
            return self._whole(layout, grad)
        result = torch.empty_like(grad)
        for target, block in zip(layout.split(result), layout.split(grad), strict=True):
            update = self._whole(layout, block.reshape(-1, block.size(-1)))
            target.copy_(update.view(block.shape))
        return result

    def _whole(self, layout: Layout, x: Tensor) -> Tensor:
        if layout.shards is None or self.tp_mode == "blockwise":
            return cast(Tensor, self.scaled_orthogonalize_fn(x))
        parts = [torch.empty_like(x) for _ in range(layout.shards.size())]
        dist.all_gather(parts, x.contiguous(), group=layout.shards)
        whole = self.scaled_orthogonalize_fn(torch.cat(parts, dim=layout.dim))
        return cast(Tensor, whole.chunk(len(parts), dim=layout.dim)[layout.shards.rank()])


class _Sharded:
    """The hooks of `Muon` and its relatives, with a weight's layout. First in the list of bases.

    Class attribute `tp_mode`: "duplicated" takes a cut matrix as a whole; "blockwise" takes each shard for a matrix.
    """

    tp_mode: TensorParallelMode

    def _cut(self, p: Tensor) -> Layout | None:
        layout = layout_of(p)
        return layout if layout.shards is not None and self.tp_mode == "duplicated" else None

    def state_shapes(self, param: Tensor) -> dict[str, Shape]:
        if param.ndim != 3:
            return super().state_shapes(param)  # type: ignore[misc, no-any-return]
        one = super().state_shapes(param[0])  # type: ignore[misc]
        return {name: (param.shape[0], *shape) for name, shape in one.items()}

    def largest_magnitude(self, p: Tensor, x: Tensor) -> Tensor:
        """The largest magnitude of the matrix that each row belongs to; (rows, 1), or (stack, 1, 1)."""
        layout = layout_of(p)
        if x.ndim == 3:
            return x.abs().amax(dim=(-2, -1), keepdim=True)
        blocks = layout.split(x)
        largest = torch.stack([block.abs().amax() for block in blocks])
        if (cut := self._cut(p)) is not None:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=cut.shards)
        if len(blocks) == 1:
            return largest.view(1, 1)
        rows = torch.empty(x.size(0), 1, dtype=x.dtype, device=x.device)
        for target, value in zip(layout.split(rows), largest, strict=True):
            target.fill_(value)
        return rows

    def blocks(self, p: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return x.unbind(0) if x.ndim == 3 else layout_of(p).split(x)

    def shard_mean(self, p: Tensor, mean: Tensor, *, within_rows: bool = False) -> Tensor:
        cut = self._cut(p)
        if cut is None or (within_rows and cut.dim == 0):
            return mean
        assert cut.shards is not None
        dist.all_reduce(mean, group=cut.shards)
        return mean / cut.shards.size()


class _ShardedNorm(_Sharded):
    """The norm of a gradient in MARS and MARS-M: that of a whole weight, or of each matrix of a stack."""

    def squared_norm(self, param: Tensor, x: Tensor) -> Tensor:
        if x.ndim == 3:
            return x.square().sum(dim=(-2, -1), keepdim=True)
        squares = x.square().sum()
        if (cut := self._cut(param)) is not None:
            dist.all_reduce(squares, group=cut.shards)
        return squares


class ShardedMuon(_Sharded, Muon, _WholeMatrices):
    """`Muon` with layouts.

    Attributes:
        extra_scale_factor: takes the place of 0.2 in the spectral scale and of 1 in the others; None leaves them.
    """

    extra_scale_factor: float | None = None

    def scale(self, rows: int, columns: int) -> float:
        scale = super().scale(rows, columns)
        if self.extra_scale_factor is None:
            return scale
        return scale * self.extra_scale_factor / (RMS if self.scale_mode == "spectral" else 1.0)


class ShardedNorMuon(_Sharded, NorMuon, _WholeMatrices):
    """`NorMuon` with layouts."""


class ShardedAdaMuon(_Sharded, AdaMuon, _WholeMatrices):
    """`AdaMuon` with layouts."""


class ShardedMarsM(_ShardedNorm, MarsM, _WholeMatrices):
    """`MarsM` with layouts."""


class ShardedMars(Mars):
    """`Mars` with layouts; weights without one are whole."""

    def squared_norm(self, param: Tensor, x: Tensor) -> Tensor:
        squares = x.square().sum()
        layout = getattr(param, LAYOUT, WHOLE)
        if layout.shards is not None:
            dist.all_reduce(squares, group=layout.shards)
        return squares


SHARDED: Mapping[str, type[torch.optim.Optimizer]] = {
    "muon": ShardedMuon,
    "normuon": ShardedNorMuon,
    "adamuon": ShardedAdaMuon,
    "mars-m": ShardedMarsM,
    "mars": ShardedMars,
}
"""The class that takes the place of the catalogue's in a run."""
