# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Qwen3-MoE: Llama with norms of queries and keys, and experts in every layer."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron_async.models.huggingface.families import llama
from megatron_async.models.huggingface.families.family import Pair, opposite, same
from megatron_async.models.huggingface.weights import gated_feed_forward, of_layers

LAYER = llama.LAYER | {
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.router.weight": "mlp.gate.weight",
    **gated_feed_forward("mlp.experts.local_experts.{expert}", "mlp.experts.{expert}"),
}


def _strength_of_loss(args: Namespace) -> Any:
    """Of the first of the router's losses."""
    return args.moe_aux_loss_coeff[0] if isinstance(args.moe_aux_loss_coeff, list) else args.moe_aux_loss_coeff


def _problems_of_arguments(args: Namespace) -> Iterator[str]:
    if args.moe_shared_expert_intermediate_size:
        yield f"--moe-shared-expert-intermediate-size: {QWEN3_MOE.name} has no shared expert."


QWEN3_MOE = replace(
    llama.LLAMA,
    name="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    describes=lambda args: bool(args.num_experts),
    pairs={
        **llama.LLAMA.pairs,
        **same(num_experts="num_experts", num_experts_per_tok="moe_router_topk"),
        "moe_intermediate_size": Pair("moe_ffn_hidden_size"),
        "router_aux_loss_coef": Pair("moe_aux_loss_coeff", _strength_of_loss),
        **opposite("norm_topk_prob", "moe_router_pre_softmax"),
    },
    defaults=llama.DEFAULTS | {"num_key_value_heads": 4, "router_aux_loss_coef": 0.001, "norm_topk_prob": False},
    fixed_arguments={
        **llama.LLAMA.fixed_arguments,
        **{"qk_layernorm": True, "moe_router_score_function": "softmax", "moe_layer_freq": 1},
        **dict.fromkeys(("moe_router_enable_expert_bias", "moe_shared_expert_gate"), False),
        **dict.fromkeys(("moe_router_num_groups", "moe_router_topk_scaling_factor")),
    },
    fixed_keys={"hidden_act": "silu", "attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    weights=llama.MODEL | of_layers(LAYER),
    problems_of_arguments=_problems_of_arguments,
)
