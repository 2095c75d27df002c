# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Numbers that a layer of torch modules keeps for each token from forward to backward.

Torch keeps what fused kernels compute again: the normalized input of a norm, each operand of a gated activation, the
scores of attention, the products inside a chunk of a recurrence. Counted from the tensors that autograd saves in fp32
(tests/unit/planning/test_activations.py), without small ones. Each count is of one rank without tensor parallelism.
"""

import argparse

from megatron_async.models import delta_rule, hybrid, state_space
from megatron_async.planning.resolve import key_value_heads


def norm(args: argparse.Namespace) -> int:
    """Input and output of a norm; RMSNorm of torch operations also keeps the normalized input."""
    return args.hidden_size * (3 if args.normalization == "RMSNorm" else 2)


def feed_forward(args: argparse.Namespace, size: int) -> int:
    """SwiGLU: both projections, each operand of their product, the product."""
    return size * (5 if args.swiglu else 2)


def projections(args: argparse.Namespace) -> int:
    """Of attention without its scores: projections, rotated queries and keys, context."""
    query = args.num_attention_heads * args.kv_channels
    groups = key_value_heads(args)
    key, repeated = groups * args.kv_channels, groups != args.num_attention_heads
    kept = 4 * query if repeated else 3 * query  # queries, keys, values and context, by head
    if args.qk_layernorm or not repeated:  # a view of all projections
        kept += query + 2 * key + (query if args.attention_output_gate else 0)
    kept += 2 * query + key if args.qk_layernorm else 0
    return kept + (2 * query if args.attention_output_gate else 0)


def scores(args: argparse.Namespace) -> int:
    """Softmax of the scores, unless core attention is recomputed; dropout keeps its mask and its result too."""
    if args.recompute_granularity == "selective" and "core_attn" in (args.recompute_modules or []):
        return 0
    return args.seq_length * args.num_attention_heads * (3 if args.attention_dropout else 1)


def linear_attention(args: argparse.Namespace) -> int:
    """Gated DeltaNet by `models.delta_rule`."""
    chunk, heads = delta_rule.CHUNK, args.linear_num_value_heads
    key = args.linear_num_key_heads * args.linear_key_head_dim
    value, repeated = heads * args.linear_value_head_dim, heads * args.linear_key_head_dim
    projected, convolved = 2 * key + 2 * value + 2 * heads, 3 * (2 * key + value)
    states = value * args.linear_key_head_dim // chunk
    return projected + convolved + 5 * chunk * heads + 8 * (repeated + value) + 3 * value // 2 + states + 8 * heads


def mamba(args: argparse.Namespace) -> int:
    """Mamba-2 by `models.state_space`."""
    chunk, heads = state_space.CHUNK, hybrid.mamba_heads(args)
    inner, mapped = heads * args.mamba_head_dim, 2 * args.mamba_num_groups * args.mamba_state_dim
    projected, convolved = 2 * inner + mapped + heads, 3 * (inner + mapped)
    scan = 3 * chunk * heads + 7 * (inner + heads * args.mamba_state_dim) // 2 + inner // 2 + 5 * heads
    return projected + convolved + scan + inner * args.mamba_state_dim // chunk + 5 * inner


def experts(args: argparse.Namespace) -> int:
    """Routed tokens before and inside their experts, the products with the routers' probabilities, a shared expert."""
    inner = feed_forward(args, args.moe_ffn_hidden_size) + args.moe_ffn_hidden_size
    routed = args.moe_router_topk * (args.hidden_size + inner)
    shared = args.moe_shared_expert_intermediate_size
    gate = args.hidden_size if shared and args.moe_shared_expert_gate else 0
    # Probabilities, and int64 places of the routed tokens.
    return routed + (feed_forward(args, shared) if shared else 0) + gate + 3 * args.num_experts
