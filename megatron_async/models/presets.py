# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""`--model NAME`: named sets of Megatron's architecture arguments, nothing else."""

from typing import Any

# Llama-style blocks (arXiv 2302.13971), as every dense model here uses them.
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

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        **_LLAMA,
        "num_layers": 4,
        "hidden_size": 192,
        "ffn_hidden_size": 512,
        "num_attention_heads": 6,
        "group_query_attention": True,
        "num_query_groups": 2,
        "seq_length": 128,
        "max_position_embeddings": 128,
    },
}


def arguments(name: str) -> dict[str, Any]:
    """Argument destinations and values of a preset.

    Raises:
        ValueError: unknown name; the message lists the known ones.
    """
    if name not in PRESETS:
        raise ValueError(f"--model {name}: no such preset. Known: {', '.join(sorted(PRESETS))}.")
    return dict(PRESETS[name])
