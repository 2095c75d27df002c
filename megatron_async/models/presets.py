# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""`--model NAME`: named sets of Megatron's architecture arguments, nothing else.

The shapes that arXiv 2606.30634 states are taken from it; what it leaves open is chosen so that total and active
parameters come out as stated. docs/models.md has the arithmetic and says which is which.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Preset:
    """A model by name.

    Attributes:
        summary: one line for people.
        source: where the shape comes from.
        arguments: Megatron's argument destinations and values.
        total, active: parameters with the vocabulary of the arguments, and those that take part in one token.
        miniature_of: name of the preset that this one is the laptop form of, or "".
    """

    summary: str
    source: str
    arguments: Mapping[str, Any]
    total: int
    active: int
    miniature_of: str = ""


# Llama-style blocks (arXiv 2302.13971), as every model here uses them.
_LLAMA = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "use_rotary_position_embeddings": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "untie_embeddings_and_output_weights": True,
}


def _context(length: int) -> dict[str, int]:
    return {"seq_length": length, "max_position_embeddings": length}


def _heads(query: int, groups: int, size: int) -> dict[str, Any]:
    """Grouped queries: `query` heads of `size` channels share `groups` keys and values."""
    return {
        "num_attention_heads": query,
        "group_query_attention": True,
        "num_query_groups": groups,
        "kv_channels": size,
    }


def _experts(number: int, chosen: int, size: int) -> dict[str, Any]:
    """Experts of `size` hidden channels; each token takes `chosen` of them, weighted by a softmax over those."""
    return {
        "num_experts": number,
        "moe_router_topk": chosen,
        "moe_ffn_hidden_size": size,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": False,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": ["aux_loss"],
        "moe_aux_loss_coeff": [0.001],  # Qwen3-MoE's and Qwen3-Next's router_aux_loss_coef
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": True,
    }


# HuggingFaceTB/SmolLM2-135M and -360M, config.json: rope base, norm epsilon, tied embeddings.
_SMOLLM2 = {
    **_LLAMA,
    "untie_embeddings_and_output_weights": False,
    "rotary_base": 100_000,
    "layernorm_epsilon": 1e-5,
}

# Qwen3-MoE blocks: query and key norms.
_MOE_2B = {
    **_LLAMA,
    "qk_layernorm": True,
    "rotary_base": 1_000_000,
    "layernorm_epsilon": 1e-6,
    "init_method_std": 0.02,
}

# Qwen3-Next blocks: three Gated DeltaNet layers, then one gated attention layer; zero-centered norms; a shared expert
# with a trainable gate.
_HYBRID = {
    **_LLAMA,
    "qk_layernorm": True,
    "attention_output_gate": True,
    "rotary_percent": 0.25,
    "rotary_base": 10_000_000,
    "layernorm_epsilon": 1e-6,
    "layernorm_zero_centered_gamma": True,
    "init_method_std": 0.02,
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 4,
    "linear_conv_kernel_dim": 4,
    "moe_shared_expert_gate": True,
}

# The quick start's tokenizer. A run with a tokenizer takes that one's size.
_MINI_VOCABULARY = {"vocab_size": 4096}

PRESETS: dict[str, Preset] = {
    "tiny": Preset(
        summary="Llama-style, for the quick start",
        source="our choice",
        total=2_623_616,
        active=2_623_616,
        arguments={**_LLAMA, **_context(128), **_heads(4, 2, 32), "num_layers": 8, "hidden_size": 128}
        | {"ffn_hidden_size": 384}
        | _MINI_VOCABULARY,
    ),
    "smollm2-135m": Preset(
        summary="dense, Llama-style, tied embeddings",
        source="HuggingFaceTB/SmolLM2-135M config.json; context of the paper",
        total=134_515_008,
        active=134_515_008,
        arguments={**_SMOLLM2, **_context(1024), **_heads(9, 3, 64), "num_layers": 30, "hidden_size": 576}
        | {"ffn_hidden_size": 1536, "init_method_std": 0.0417, "vocab_size": 49_152},
    ),
    "smollm2-360m": Preset(
        summary="dense, Llama-style, tied embeddings",
        source="HuggingFaceTB/SmolLM2-360M config.json; context of the paper",
        total=361_821_120,
        active=361_821_120,
        arguments={**_SMOLLM2, **_context(1024), **_heads(15, 5, 64), "num_layers": 32, "hidden_size": 960}
        | {"ffn_hidden_size": 2560, "init_method_std": 0.02, "vocab_size": 49_152},
    ),
    "moe-2b": Preset(
        summary="64 experts, 8 for each token",
        source="the paper, E; head and expert size, norms and router loss are our choice",
        total=1_922_075_648,
        active=512_789_504,
        arguments={**_MOE_2B, **_context(8192), **_heads(16, 4, 64), **_experts(64, 8, 512)}
        | {"num_layers": 16, "hidden_size": 1024, "ffn_hidden_size": 512, "vocab_size": 131_072},
    ),
    "moe-10b-hybrid": Preset(
        summary="3 of 4 layers Gated DeltaNet; 512 experts, 10 for each token, and a gated shared one",
        source="the paper, E, and Qwen3-Next; widths, heads and router loss are our choice",
        total=10_121_599_664,
        active=646_666_928,
        arguments={**_HYBRID, **_context(8192), **_heads(8, 2, 256), **_experts(512, 10, 256)}
        | {"num_layers": 24, "hidden_size": 1024, "ffn_hidden_size": 256, "vocab_size": 131_072}
        | {"moe_shared_expert_intermediate_size": 256}
        | {"linear_num_key_heads": 6, "linear_key_head_dim": 128}
        | {"linear_num_value_heads": 12, "linear_value_head_dim": 128},
    ),
    "smollm2-135m-mini": Preset(
        summary="6 layers, a quarter of the width",
        source="our choice",
        total=1_918_800,
        active=1_918_800,
        miniature_of="smollm2-135m",
        arguments={**_SMOLLM2, **_context(128), **_heads(9, 3, 16), "num_layers": 6, "hidden_size": 144}
        | {"ffn_hidden_size": 384, "init_method_std": 0.0417}
        | _MINI_VOCABULARY,
    ),
    "smollm2-360m-mini": Preset(
        summary="8 layers, a quarter of the width",
        source="our choice",
        total=5_902_320,
        active=5_902_320,
        miniature_of="smollm2-360m",
        arguments={**_SMOLLM2, **_context(128), **_heads(15, 5, 16), "num_layers": 8, "hidden_size": 240}
        | {"ffn_hidden_size": 640, "init_method_std": 0.02}
        | _MINI_VOCABULARY,
    ),
    "moe-2b-mini": Preset(
        summary="4 layers, an eighth of the width; 16 experts, 2 for each token",
        source="our choice",
        total=2_794_688,
        active=1_418_432,
        miniature_of="moe-2b",
        arguments={**_MOE_2B, **_context(128), **_heads(16, 4, 8), **_experts(16, 2, 64)}
        | {"num_layers": 4, "hidden_size": 128, "ffn_hidden_size": 64}
        | _MINI_VOCABULARY,
    ),
    "moe-10b-hybrid-mini": Preset(
        summary="8 layers, an eighth of the width; 32 experts, 2 for each token, and a gated shared one",
        source="our choice",
        total=5_169_648,
        active=2_220_528,
        miniature_of="moe-10b-hybrid",
        arguments={**_HYBRID, **_context(128), **_heads(8, 2, 32), **_experts(32, 2, 32)}
        | {"num_layers": 8, "hidden_size": 128, "ffn_hidden_size": 32}
        | {"moe_shared_expert_intermediate_size": 32}
        | {"linear_num_key_heads": 4, "linear_key_head_dim": 24}
        | {"linear_num_value_heads": 8, "linear_value_head_dim": 24}
        | _MINI_VOCABULARY,
    ),
}


def arguments(name: str) -> dict[str, Any]:
    """Argument destinations and values of a preset.

    Raises:
        ValueError: unknown name; the message lists the known ones.
    """
    if name not in PRESETS:
        raise ValueError(f"--model {name}: no such preset. Known: {', '.join(sorted(PRESETS))}.")
    return dict(PRESETS[name].arguments)
