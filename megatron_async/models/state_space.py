# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The state-space scan of Mamba-2 in plain torch.

For one head with inputs x, steps dt > 0, decay A < 0, input map B and output map C (arXiv 2405.21060):

    h_t = exp(dt_t A) h_(t-1) + dt_t B_t x_t^T,    y_t = h_t^T C_t + D x_t

Inside a chunk of tokens the recurrence is a masked matrix product; between chunks the state is carried.
"""

import torch
import torch.nn.functional as F

CHUNK = 64
"""Tokens of a chunk. The result does not depend on it but for rounding."""


def state_space_scan(
    x: torch.Tensor,
    steps: torch.Tensor,
    decay: torch.Tensor,
    inputs: torch.Tensor,
    outputs: torch.Tensor,
    skip: torch.Tensor,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """The recurrence of the module, chunk by chunk, in fp32; sums of log decays in fp64.

    Args:
        x: [batch, sequence, heads, head size].
        steps: dt, [batch, sequence, heads], positive.
        decay: A, [heads], negative.
        inputs, outputs: B and C, [batch, sequence, groups, state size]; `heads / groups` heads share a group.
        skip: D, [heads].
        chunk: tokens of a chunk.

    Returns:
        y, [batch, sequence, heads, head size], in the type of x.
    """
    length, heads = x.shape[1:3]
    padding = -length % chunk

    def chunked(values: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, heads or groups, ...] -> [batch, heads, chunks, chunk, ...]; padding writes nothing."""
        values = values.repeat_interleave(heads // values.shape[2], dim=2)
        values = F.pad(values, (0, 0) * (values.dim() - 2) + (0, padding))
        return values.unflatten(1, (-1, chunk)).movedim(3, 1)

    b, c = chunked(inputs.float()), chunked(outputs.float())
    written = chunked(x.float() * steps.float().unsqueeze(-1))
    decayed = chunked((steps.double() * decay.double()).unsqueeze(-1)).squeeze(-1).cumsum(-1)

    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()
    between = (decayed.unsqueeze(-1) - decayed.unsqueeze(-2)).masked_fill(~causal, float("-inf")).float().exp()
    inside = (c @ b.transpose(-1, -2) * between) @ written
    carried = c * decayed.float().exp().unsqueeze(-1)
    added = (b * between[..., -1, :].unsqueeze(-1)).transpose(-1, -2) @ written  # [..., state size, head size]
    kept = decayed[..., -1].float().exp()

    state = torch.zeros_like(added[:, :, 0])
    parts = []
    for index in range(added.shape[2]):
        parts.append(inside[:, :, index] + carried[:, :, index] @ state)
        state = state * kept[:, :, index, None, None] + added[:, :, index]
    y = torch.stack(parts, dim=2).flatten(2, 3)[:, :, :length].transpose(1, 2)
    return (y + skip.float().unsqueeze(-1) * x.float()).type_as(x)
