# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The gated delta rule and its causal convolution in plain torch, with resets at document starts.

For one head with keys k, queries q, values v, log decay g <= 0 and writing strength beta (arXiv 2412.06464):

    S_t = exp(g_t) S_(t-1) + beta_t k_t (v_t - exp(g_t) S_(t-1)^T k_t)^T,    o_t = S_t^T q_t / sqrt(key size)

The state is zero before the first token of a document. Inside a chunk of tokens the recurrence is a unit
lower-triangular system, solved at once; between chunks the state is carried.
"""

import torch
import torch.nn.functional as F

CHUNK = 64
"""Tokens of a chunk, as in flash-linear-attention."""

L2_EPS = 1e-6
"""Epsilon of the norm of queries and keys, as in Qwen3-Next and flash-linear-attention."""


def l2_normalize(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum(x²) + 1e-6) over the last dimension, in fp32, returned in the type of x."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + L2_EPS)).type_as(x)


def document_starts(attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    """First tokens of documents, read from Megatron's attention mask.

    Args:
        attention_mask: bool [batch or 1, 1, sequence, sequence], True where attention is barred; or None.

    Returns:
        bool [batch or 1, sequence], True at tokens that may not see the token before them; None without such tokens.
    """
    if attention_mask is None or attention_mask.dim() != 4 or attention_mask.shape[-1] != attention_mask.shape[-2]:
        return None
    barred = attention_mask[:, 0].diagonal(offset=-1, dim1=1, dim2=2)
    if not bool(barred.any()):
        return None
    return F.pad(barred, (1, 0), value=False)


def causal_convolution(x: torch.Tensor, weight: torch.Tensor, starts: torch.Tensor | None = None) -> torch.Tensor:
    """Depthwise causal convolution of x [batch, sequence, channels] that does not reach over document starts.

    Args:
        weight: [channels, width]; the last column is for the token itself.
        starts: see `document_starts`.
    """
    width = weight.shape[1]
    if starts is None:
        padded = F.pad(x.transpose(1, 2), (width - 1, 0))
        return F.conv1d(padded, weight.unsqueeze(1), groups=x.shape[2]).transpose(1, 2)
    documents = starts.cumsum(-1)
    result = x * weight[:, -1]
    for back in range(1, min(width, x.shape[1])):
        same = documents[:, back:] == documents[:, :-back]
        term = x[:, :-back] * same.unsqueeze(-1) * weight[:, width - 1 - back]
        result = result + F.pad(term, (0, 0, back, 0))
    return result


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    starts: torch.Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence of the module, chunk by chunk, in fp32; sums of log decays in fp64.

    Args:
        query, key: [batch, sequence, heads, key size]; keys of norm above 1 make the system ill-conditioned.
        value: [batch, sequence, heads, value size].
        log_decay: [batch, sequence, heads], at most 0.
        beta: [batch, sequence, heads], in [0, 1].
        starts: see `document_starts`.
        chunk: tokens of a chunk.

    Returns:
        Outputs [batch, sequence, heads, value size] in the type of the values, and the state after the last token,
        fp32 [batch, heads, key size, value size].
    """
    batch, length, heads, key_size = key.shape
    padding = -length % chunk

    def chunked(x: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, heads, ...] -> [batch, heads, chunks, chunk, ...]; padding neither writes nor decays."""
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, padding))
        return x.unflatten(1, (-1, chunk)).movedim(3, 1)

    q, k, v = (chunked(x.float()) for x in (query * key_size**-0.5, key, value))
    b = chunked(beta.float().unsqueeze(-1))
    decayed = chunked(log_decay.double()).cumsum(-1)
    same, untouched = _documents(starts, length, chunk, key.device)

    between = (decayed.unsqueeze(-1) - decayed.unsqueeze(-2)).masked_fill(~same, float("-inf")).float().exp()
    since_start = decayed.float().exp() * untouched
    system = (b * k) @ k.transpose(-1, -2) * between
    # The solver assumes the unit diagonal and reads only the part below it.
    written = torch.linalg.solve_triangular(
        system, torch.cat([b * v, b * k * since_start.unsqueeze(-1)], dim=-1), upper=False, unitriangular=True
    )
    new_values, replaced = written.split([v.shape[-1], key_size], dim=-1)
    scores = q @ k.transpose(-1, -2) * between
    until_end = between[..., -1, :].unsqueeze(-1) * k
    carried = q * since_start.unsqueeze(-1)

    state = v.new_zeros(batch, heads, key_size, v.shape[-1])
    outputs = []
    for index in range(q.shape[2]):
        fresh = new_values[:, :, index] - replaced[:, :, index] @ state
        outputs.append(carried[:, :, index] @ state + scores[:, :, index] @ fresh)
        state = state * since_start[:, :, index, -1, None, None] + until_end[:, :, index].transpose(-1, -2) @ fresh
    out = torch.stack(outputs, dim=2).flatten(2, 3)[:, :, :length]
    return out.transpose(1, 2).type_as(value), state


def _documents(
    starts: torch.Tensor | None, length: int, chunk: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of tokens in a chunk that see each other, and tokens that see the state from before the chunk.

    Returns:
        bool [batch or 1, 1, chunks or 1, chunk, chunk], and [batch or 1, 1, chunks or 1, chunk].
    """
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=device).tril()
    if starts is None:
        return causal[None, None, None], torch.ones(1, 1, 1, chunk, dtype=torch.bool, device=device)
    starts = F.pad(starts, (0, -length % chunk)).unflatten(1, (-1, chunk)).unsqueeze(1)
    documents = starts.cumsum(-1)
    return causal & (documents.unsqueeze(-1) == documents.unsqueeze(-2)), documents == 0
