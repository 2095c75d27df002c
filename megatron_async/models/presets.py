# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""`--model NAME`: named sets of Megatron's architecture arguments, nothing else.

Shapes come from arXiv 2606.30634 ("the paper") where it gives them. The open ones are chosen so that total and active
parameters match the paper; tests/unit/models/test_presets.py has the arithmetic.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass(frozen=True, slots=True)
class Preset:
    """A named model.

    Attributes:
        summary: one line for the table of presets.
        source: origin of the shape.
        total, active: parameters with the vocabulary of the arguments, and those used for one token.
        arguments: Megatron's argument destinations and values.
        miniature_of: name of the full-size preset, or "".
    """

    summary: str
    source: str
    total: int
    active: int
    arguments: Mapping[str, Any]
    miniature_of: str = ""


# Columns of the sizes below: every model has the first line, models with experts the second, the hybrids the third.
_COLUMNS = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("num_experts", "moe_router_topk", "moe_ffn_hidden_size"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    "moe_shared_expert_intermediate_size",
)


def _sizes(*numbers: int, context: int, vocabulary: int) -> dict[str, int]:
    lengths = {"seq_length": context, "max_position_embeddings": context, "vocab_size": vocabulary}
    return lengths | dict(zip(_COLUMNS, numbers, strict=False))


# Sizes of a model for two CPU cores. The vocabulary is the quick start's; a run with a tokenizer takes that one's size.
_small = partial(_sizes, context=128, vocabulary=4096)

# Llama-style blocks (arXiv 2302.13971), common to all presets.
_LLAMA: dict[str, Any] = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "use_rotary_position_embeddings": True,
    "group_query_attention": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "untie_embeddings_and_output_weights": True,
}

# HuggingFaceTB/SmolLM2-135M and -360M, config.json.
_SMOLLM2 = _LLAMA | {
    "untie_embeddings_and_output_weights": False,
    "rotary_base": 100_000,
    "layernorm_epsilon": 1e-5,
    "init_method_std": 0.02,
}
_SMOLLM2_135M = _SMOLLM2 | {"init_method_std": 0.0417}

# Qwen3-MoE blocks: query and key norms; the router's softmax is taken over the chosen experts.
_MOE = _LLAMA | {
    "qk_layernorm": True,
    "rotary_base": 1_000_000,
    "layernorm_epsilon": 1e-6,
    "init_method_std": 0.02,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": ["aux_loss"],
    "moe_aux_loss_coeff": [0.001],  # router_aux_loss_coef of Qwen3-MoE and Qwen3-Next
    "moe_token_dispatcher_type": "alltoall",
    "moe_grouped_gemm": True,
}

# Qwen3-Next blocks: three Gated DeltaNet layers, then one gated attention layer; zero-centered norms; a gated shared
# expert.
_HYBRID = _MOE | {
    "attention_output_gate": True,
    "rotary_percent": 0.25,
    "rotary_base": 10_000_000,
    "layernorm_zero_centered_gamma": True,
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 4,
    "linear_conv_kernel_dim": 4,
    "moe_shared_expert_gate": True,
}

PRESETS: dict[str, Preset] = {
    "tiny": Preset(
        summary="Llama-style, for the quick start",
        source="our choice",
        total=2_623_616,
        active=2_623_616,
        arguments=_LLAMA | _small(8, 128, 384, 4, 2, 32),
    ),
    "smollm2-135m": Preset(
        summary="dense, Llama-style, tied embeddings",
        source="HuggingFaceTB/SmolLM2-135M config.json; context of the paper",
        total=134_515_008,
        active=134_515_008,
        arguments=_SMOLLM2_135M | _sizes(30, 576, 1536, 9, 3, 64, context=1024, vocabulary=49_152),
    ),
    "smollm2-360m": Preset(
        summary="dense, Llama-style, tied embeddings",
        source="HuggingFaceTB/SmolLM2-360M config.json; context of the paper",
        total=361_821_120,
        active=361_821_120,
        arguments=_SMOLLM2 | _sizes(32, 960, 2560, 15, 5, 64, context=1024, vocabulary=49_152),
    ),
    "moe-2b": Preset(
        summary="64 experts, 8 for each token",
        source="the paper, E; head and expert size, norms and router loss are our choice",
        total=1_922_075_648,
        active=512_789_504,
        arguments=_MOE | _sizes(16, 1024, 512, 16, 4, 64, 64, 8, 512, context=8192, vocabulary=131_072),
    ),
    "moe-10b-hybrid": Preset(
        summary="3 of 4 layers Gated DeltaNet; 512 experts, 10 for each token, and a gated shared one",
        source="the paper, E, and Qwen3-Next; widths, heads and router loss are our choice",
        total=10_121_599_664,
        active=646_666_928,
        arguments=_HYBRID
        | _sizes(24, 1024, 256, 8, 2, 256, 512, 10, 256, 6, 12, 128, 128, 256, context=8192, vocabulary=131_072),
    ),
}


# Full-size model: summary, total, active, sizes.
_MINIATURES: dict[str, tuple[str, int, int, dict[str, int]]] = {
    "smollm2-135m": ("6 layers, a quarter of the width", 1_918_800, 1_918_800, _small(6, 144, 384, 9, 3, 16)),
    "smollm2-360m": ("8 layers, a quarter of the width", 5_902_320, 5_902_320, _small(8, 240, 640, 15, 5, 16)),
    "moe-2b": (
        "4 layers, an eighth of the width; 16 experts, 2 for each token",
        *(2_794_688, 1_418_432, _small(4, 128, 64, 16, 4, 8, 16, 2, 64)),
    ),
    "moe-10b-hybrid": (
        "8 layers, an eighth of the width; 32 experts, 2 for each token, and a gated shared one",
        *(5_169_648, 2_220_528, _small(8, 128, 32, 8, 2, 32, 32, 2, 32, 4, 8, 24, 24, 32)),
    ),
}
# Nemotron-H blocks (arXiv 2504.03624): squared ReLU, no position embedding. Its family has experts since Nemotron 3.
PRESETS["nemotron-h-mini"] = Preset(
    summary="HybridModel after Nemotron-H: Mamba-2, attention, feed-forward and experts (16, 2 for each token)",
    source="our choice",
    total=2_683_152,
    active=2_224_400,
    arguments=_MOE
    | {
        "hybrid_layer_pattern": "M-M*MEM-M*ME",
        "swiglu": False,
        "squared_relu": True,
        "qk_layernorm": False,
        "position_embedding_type": "none",
        "use_rotary_position_embeddings": False,
        "mamba_head_dim": 32,
        "mamba_state_dim": 32,
        "mamba_num_groups": 4,
    }
    | _small(12, 128, 384, 4, 2, 32, 16, 2, 64),
)
PRESETS |= {
    f"{name}-mini": Preset(summary, "our choice", total, active, {**PRESETS[name].arguments, **sizes}, name)
    for name, (summary, total, active, sizes) in _MINIATURES.items()
}


def arguments(name: str) -> dict[str, Any]:
    """Argument destinations and values of a preset.

    Raises:
        ValueError: unknown name; the message lists the known ones.
    """
    if name not in PRESETS:
        raise ValueError(f"--model {name}: no such preset. Known: {', '.join(sorted(PRESETS))}.")
    return dict(PRESETS[name].arguments)
