# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Llama, such as SmolLM2: dense layers with rotary positions. The other families change parts of its tables."""

from megatron_async.models.huggingface.families.family import Family, Pair, opposite, same
from megatron_async.models.huggingface.weights import attention, gate_and_up, gated_feed_forward, of_layers

SIZES = {
    **same(num_hidden_layers="num_layers", hidden_size="hidden_size", intermediate_size="ffn_hidden_size"),
    **same(num_attention_heads="num_attention_heads", vocab_size="vocab_size", initializer_range="init_method_std"),
    **same(max_position_embeddings="max_position_embeddings"),
    **opposite("tie_word_embeddings", "untie_embeddings_and_output_weights"),
}
"""Of every family."""
GROUPS = {
    "num_key_value_heads": Pair(
        "num_query_groups",
        lambda args: args.num_query_groups if args.group_query_attention else args.num_attention_heads,
    ),
    "head_dim": Pair("kv_channels"),
}
ROTARY = {"rope_theta": Pair("rotary_base", lambda args: float(args.rotary_base), lambda to: int(to["rope_theta"]))}
DEFAULTS = {
    "num_key_value_heads": lambda config: config["num_attention_heads"],
    "head_dim": lambda config: config["hidden_size"] // config["num_attention_heads"],
    "rope_theta": 10_000.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}
MODEL = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
}
LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.weight": "self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    **gated_feed_forward("mlp", "mlp"),
}

LLAMA = Family(
    name="LlamaForCausalLM",
    model_type="llama",
    describes=lambda args: True,
    pairs=SIZES | GROUPS | ROTARY | same(rms_norm_eps="layernorm_epsilon"),
    defaults=DEFAULTS,
    fixed_arguments={
        **{"normalization": "RMSNorm", "swiglu": True, "position_embedding_type": "rope", "rotary_percent": 1.0},
        **dict.fromkeys(("experimental_attention_variant", "mtp_num_layers")),
        **dict.fromkeys(("squared_relu", "add_bias_linear", "add_qkv_bias", "qk_layernorm"), False),
        **dict.fromkeys(("multi_latent_attention", "attention_output_gate", "rotary_interleaved"), False),
        **dict.fromkeys(("layernorm_zero_centered_gamma", "use_rope_scaling"), False),
    },
    fixed_keys={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    weights=MODEL | of_layers(LAYER),
    cuts={"linear_qkv": attention, "linear_fc1": gate_and_up},
)
