# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Matrices of equal shape, stepped together: one 3-D Newton-Schulz, and one collective for all tensor-parallel shards.

A matrix by itself takes 35 to 40 kernels. A batch takes as many, however many matrices it holds.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_async.optim.layout import Layout, layout_of
from megatron_async.optim.step import PIECE

CPU_BATCH = 1 << 18
"""Elements of a batch on a CPU: 1 MiB in fp32, which stays in the cache. Twice or a quarter as large is slower."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Matrices of one shape (rows, columns) and one layout, from one parameter group.

    Attributes:
        layout: of each matrix.
        weights, grads: each matrix and its gradient; those of a stack of matrices are views of it.
        state: name -> the buffer of each matrix.
    """

    layout: Layout
    weights: list[Tensor]
    grads: list[Tensor]
    state: Mapping[str, list[Tensor]]


def batches(params: list[Tensor], grads: list[Tensor], state: Mapping[str, list[Tensor]]) -> Iterator[Batch]:
    """Batches of at least one matrix and at most `PIECE` elements (`CPU_BATCH` on a CPU), all shards together.

    A step holds up to six times a batch at once, 24 bytes for each element. The order depends on shapes and layouts
    alone: the ranks that share a matrix issue their collectives in the same order.

    Args:
        params: of shape (rows, columns) or (stack, rows, columns).
        grads: of each parameter, in its shape.
        state: name -> the buffer of each parameter, with the stack's axis where the parameter has one.
    """
    alike: dict[tuple[Layout, torch.Size, torch.device], list[tuple[Tensor, ...]]] = {}
    for param, *others in zip(params, grads, *state.values(), strict=True):
        tensors = (param.detach(), *others)
        matrices = zip(*(x.unbind(0) for x in tensors), strict=True) if param.ndim == 3 else [tensors]
        alike.setdefault((layout_of(param), param.shape[-2:], param.device), []).extend(matrices)
    for (layout, shape, device), members in alike.items():
        size = max(1, (CPU_BATCH if device.type == "cpu" else PIECE) // (shape.numel() * layout.ranks))
        for first in range(0, len(members), size):
            weights, own, *buffers = map(list, zip(*members[first : first + size], strict=True))
            yield Batch(layout, weights, own, dict(zip(state, buffers, strict=True)))
