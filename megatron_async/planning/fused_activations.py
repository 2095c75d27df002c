# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Numbers that a layer of fused GPU kernels keeps for each token from forward to backward.

Each count is of all tensor-parallel ranks. See `torch_activations` for layers of torch modules.
"""

import argparse

from megatron_async.models import hybrid
from megatron_async.planning.resolve import key_value_heads, width_of


def norm(args: argparse.Namespace) -> int:
    """Input and output of a norm."""
    return 2 * int(args.hidden_size)


def feed_forward(args: argparse.Namespace, size: int) -> int:
    """Gate, up and their product; without a gate, the operands of the activation."""
    return size * (3 if args.swiglu else 2)


def projections(args: argparse.Namespace) -> int:
    """Queries, keys, values, the output of attention, and what norms and gates read."""
    query, key_value = args.num_attention_heads * args.kv_channels, 2 * key_value_heads(args) * args.kv_channels
    gate = 2 * query if args.attention_output_gate else 0  # the gate, and the output before it
    norms = query + key_value // 2 if args.qk_layernorm else 0
    return int(2 * query + key_value + gate + norms)


def scores(args: argparse.Namespace) -> int:
    """None: flash attention computes them again."""
    return 0


def linear_attention(args: argparse.Namespace) -> int:
    """Gated DeltaNet."""
    key = args.linear_num_key_heads * args.linear_key_head_dim
    value = args.linear_num_value_heads * args.linear_value_head_dim
    repeated = args.linear_num_value_heads * args.linear_key_head_dim
    projected = 2 * key + 2 * value
    convolved = 2 * (2 * key + value)  # before and after the activation
    return int(projected + convolved + 2 * repeated + 3 * value)  # queries and keys by head; output, norm, gated


def mamba(args: argparse.Namespace) -> int:
    """Mamba-2."""
    heads = hybrid.mamba_heads(args)
    inner, mapped = heads * args.mamba_head_dim, 2 * args.mamba_num_groups * args.mamba_state_dim
    # Projected; x, B, C before and after the activation; output, gated, normalized.
    return int(2 * inner + mapped + heads + 2 * (inner + mapped) + 3 * inner)


def experts(args: argparse.Namespace) -> int:
    """Tokens sent to the experts and back, the experts' own, a shared expert, the router."""
    chosen = args.moe_router_topk
    sent = 2 * chosen * args.hidden_size
    router = 2 * args.num_experts * 4 // width_of(args)  # logits and probabilities in fp32
    inside = chosen * feed_forward(args, args.moe_ffn_hidden_size)
    shared = feed_forward(args, args.moe_shared_expert_intermediate_size or 0)
    # Every tensor-parallel rank has the tokens and the router whole.
    return int((sent + router) * args.tensor_model_parallel_size + inside + shared)
