# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next: Qwen3-MoE with zero-centered norms, a gated shared expert, and gated attention in every n-th layer; the
others are Gated DeltaNet."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from megatron_async.models.huggingface.families import llama, qwen3_moe
from megatron_async.models.huggingface.families.family import Settings, same
from megatron_async.models.huggingface.families.qwen3_moe import QWEN3_MOE
from megatron_async.models.huggingface.weights import Tensors, attention, gated_feed_forward, of_layers

_LAYER = qwen3_moe.LAYER | {
    "self_attention.in_proj.layer_norm_weight": "input_layernorm.weight",
    "self_attention.in_proj.weight": "linear_attn.in_proj_qkvz.weight linear_attn.in_proj_ba.weight",
    "self_attention.conv1d.weight": "linear_attn.conv1d.weight",
    "self_attention.A_log": "linear_attn.A_log",
    "self_attention.dt_bias": "linear_attn.dt_bias",
    "self_attention.out_norm.weight": "linear_attn.norm.weight",
    "self_attention.out_proj.weight": "linear_attn.out_proj.weight",
    "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
    **gated_feed_forward("mlp.shared_experts", "mlp.shared_expert"),
}
_LINEAR = ("num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim", "conv_kernel_dim")


def _delta_net(weight: torch.Tensor, settings: Settings) -> Tensors:
    """Megatron's rows: all queries, keys, values, output gates, writing strengths (beta), decays (alpha).

    Hugging Face's: for each key head its query, key, values and gates; and, apart, its strengths and decays.
    """
    heads = settings["linear_num_value_heads"]
    keys = settings["linear_num_key_heads"] * settings["linear_key_head_dim"]
    values = heads * settings["linear_value_head_dim"]
    parts = weight.split([keys, keys, values, values, heads, heads])
    by_head = [part.unflatten(0, (settings["linear_num_key_heads"], -1)) for part in parts]
    return torch.cat(by_head[:4], dim=1).flatten(0, 1), torch.cat(by_head[4:], dim=1).flatten(0, 1)


def _problems_of_arguments(args: Namespace) -> Iterator[str]:
    if not args.num_experts:
        yield f"no experts: {QWEN3_NEXT.name} has experts in every layer."
    elif not args.moe_shared_expert_intermediate_size:
        yield f"no --moe-shared-expert-intermediate-size: {QWEN3_NEXT.name} has a shared expert in every layer."
    if not isinstance(args.linear_attention_freq, int):
        yield f"--linear-attention-freq {args.linear_attention_freq}: only every n-th full layer can be converted."


def _normalize(settings: dict[str, Any]) -> None:
    if kinds := settings.get("layer_types"):
        settings["full_attention_interval"] = [*kinds, "full_attention"].index("full_attention") + 1


def _problems_of_config(settings: Settings) -> Iterator[str]:
    kinds, every = settings.get("layer_types", []), settings["full_attention_interval"]
    if kinds != ["linear_attention" if layer % every else "full_attention" for layer in range(1, len(kinds) + 1)]:
        yield f"config.json: layer_types is {kinds}; only a full_attention layer every n-th can be converted."


QWEN3_NEXT = replace(
    QWEN3_MOE,
    name="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    describes=lambda args: args.experimental_attention_variant == "gated_delta_net",
    pairs={
        **QWEN3_MOE.pairs,
        **same(partial_rotary_factor="rotary_percent", full_attention_interval="linear_attention_freq"),
        **same(shared_expert_intermediate_size="moe_shared_expert_intermediate_size"),
        **same(**{f"linear_{size}": f"linear_{size}" for size in _LINEAR}),
    },
    defaults={
        **QWEN3_MOE.defaults,
        **{"num_key_value_heads": 2, "head_dim": 256, "norm_topk_prob": True, "partial_rotary_factor": 0.25},
        **{"shared_expert_intermediate_size": 512, "full_attention_interval": 4},
    },
    fixed_arguments={
        **{name: value for name, value in QWEN3_MOE.fixed_arguments.items() if name != "rotary_percent"},
        **dict.fromkeys(("attention_output_gate", "layernorm_zero_centered_gamma", "moe_shared_expert_gate"), True),
        "experimental_attention_variant": "gated_delta_net",
    },
    weights=llama.MODEL | of_layers(_LAYER),
    cuts={**QWEN3_MOE.cuts, "linear_qkv": partial(attention, gated=True), "in_proj": _delta_net},
    problems_of_arguments=_problems_of_arguments,
    problems_of_config=_problems_of_config,
    normalize=_normalize,
)
