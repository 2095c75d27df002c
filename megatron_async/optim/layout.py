# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Matrices inside weights that are fused, stacked or cut into tensor-parallel shards.

A matrix optimizer treats every matrix of a weight by itself and as a whole: shards are gathered first, so that the
update does not depend on the tensor-parallel size. Norms and means over a matrix are reduced over its shards too.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

LAYOUT = "matrix_layout"
"""Attribute of a parameter that holds its `Layout`; the fp32 master copy of a parameter needs it too."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The matrices in a weight of shape (rows, columns), or (stack, rows, columns).

    Attributes:
        rows: rows of each fused matrix in one repetition, on this rank; empty for a weight that is one matrix. A
            weight whose rows are q k v q k v has two repetitions, and its q is one matrix of both parts.
        shards: process group over which every matrix is cut, None where this rank holds all of it.
        dim: axis of the cut, 0 for rows (outputs) and 1 for columns (inputs).
    """

    rows: tuple[int, ...] = ()
    shards: dist.ProcessGroup | None = None
    dim: int = 0

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse a weight that the layout does not fit.

        Raises:
            ValueError: the rows do not repeat a whole number of times, or a stack of matrices is fused or cut.
        """
        if len(shape) == 3 and (self.rows or self.shards is not None):
            raise ValueError(f"{name}: a stack of matrices, shape {shape}, cannot be cut over tensor-parallel ranks.")
        if self.rows and shape[0] % sum(self.rows):
            raise ValueError(
                f"{name}: {shape[0]} rows on this rank are not a multiple of its fused blocks {self.rows} = "
                f"{sum(self.rows)} rows. Use a tensor-parallel size that divides the number of key/value groups, or "
                "send the fused projection to Adam (--optimizer-for)."
            )

    @property
    def ranks(self) -> int:
        """Number of shards of each matrix."""
        return 1 if self.shards is None else self.shards.size()

    def shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """Rows and columns of each whole matrix in a weight that has this shape on this rank."""
        *_, rows, columns = shape
        parts = [part * (rows // sum(self.rows)) for part in self.rows] or [rows]
        by_rows, by_columns = (self.ranks, 1) if self.dim == 0 else (1, self.ranks)
        return tuple((part * by_rows, columns * by_columns) for part in parts)

    def matrices(self, x: Tensor) -> tuple[Tensor, ...]:
        """Views of each fused matrix in a batch (batch, rows, columns) that has the weight's rows.

        Shape: (batch, ..., columns); all axes between are rows.
        """
        if not self.rows:
            return (x,)
        return tuple(x.view(len(x), -1, sum(self.rows), x.size(-1)).split(list(self.rows), dim=2))

    def total(self, value: Tensor) -> Tensor:
        """Sum of a value over the shards, in place."""
        if self.shards is not None:
            dist.all_reduce(value, group=self.shards)
        return value

    def mean(self, value: Tensor, *, of_rows: bool = False) -> Tensor:
        """Average of a mean over the shards; the mean of each row is complete where the weight is cut by rows."""
        if self.shards is None or (of_rows and self.dim == 0):
            return value
        return self.total(value) / self.ranks

    def apply(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """The function of whole matrices; returns this rank's part of the results. One collective.

        Args:
            function: of a batch of matrices (batch, rows, columns), in which each is treated by itself.
            x: this rank's part of a batch of weights, (batch, rows, columns).
        """
        whole = self._gathered(x)
        if self.rows:
            result = torch.empty_like(whole)
            for target, part in zip(self.matrices(result), self.matrices(whole), strict=True):
                target.copy_(function(part.flatten(1, 2)).view(part.shape))
        else:
            result = function(whole)
        return result if self.shards is None else result.chunk(self.ranks, dim=self.dim + 1)[self.shards.rank()]

    def _gathered(self, x: Tensor) -> Tensor:
        if self.shards is None:
            return x
        parts = x.new_empty(self.ranks * x.size(0), *x.shape[1:])  # gloo takes parts one behind the other only
        dist.all_gather_into_tensor(parts, x, group=self.shards)
        return torch.cat(parts.chunk(self.ranks), dim=self.dim + 1)


def layout_of(param: Tensor) -> Layout:
    """The layout of a parameter; one that was given none is one matrix, whole on this rank."""
    layout = getattr(param, LAYOUT, None)
    return layout if isinstance(layout, Layout) else Layout()
