# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Nemotron-H without experts: a pattern of Mamba-2 (M), attention (*) and squared-ReLU layers (-), no position
embedding."""

from collections.abc import Iterator

from megatron_async.models import hybrid
from megatron_async.models.huggingface.families import llama
from megatron_async.models.huggingface.families.family import Family, Pair, same
from megatron_async.models.huggingface.weights import attention, of_layers

_NAME = "NemotronHForCausalLM"
_PATTERN = "hybrid_override_pattern"
_OF_GPT = "A pattern of a GPT's layers can be converted after `megatron-async convert to-gpt`"
_REASONS = {
    "E": f"{_NAME} routes by sigmoid scores and always has a shared expert, which is not supported here",
    "G": f"{_NAME} has no Gated DeltaNet. {_OF_GPT}",
    "+": f"{_NAME} has no multi-latent attention. {_OF_GPT}",
}
_LAYER = {
    **dict.fromkeys(("norm.weight", "input_layernorm.weight", "pre_mlp_layernorm.weight"), "norm.weight"),
    **{f"mixer.conv1d_{name}": f"mixer.conv1d.{name}" for name in ("weight", "bias")},
    **{f"mixer.{name}": f"mixer.{name}" for name in ("A_log", "D", "dt_bias", "norm.weight")},
    **{f"mixer.{name}_proj.weight": f"mixer.{name}_proj.weight" for name in ("in", "out")},
    "self_attention.linear_qkv.weight": "mixer.q_proj.weight mixer.k_proj.weight mixer.v_proj.weight",
    "self_attention.linear_proj.weight": "mixer.o_proj.weight",
    "mlp.linear_fc1.weight": "mixer.up_proj.weight",
    "mlp.linear_fc2.weight": "mixer.down_proj.weight",
}


def _problems(pattern: str, where: str) -> Iterator[str]:
    """Layers of a pattern that cannot be converted, with their positions."""
    for position, letter in enumerate(hybrid.layers_of(pattern)):
        if letter not in "M*-":
            yield f"{where} {pattern}: {letter!r} at position {position}: {_REASONS.get(letter, 'unknown')}."


NEMOTRON_H = Family(
    name=_NAME,
    model_type="nemotron_h",
    describes=lambda args: args.hybrid_layer_pattern is not None,
    pairs={
        **llama.SIZES,
        **llama.GROUPS,
        "num_hidden_layers": Pair("num_layers", write=lambda settings: None),  # it follows from the pattern
        _PATTERN: Pair("hybrid_layer_pattern", lambda args: hybrid.layers_of(args.hybrid_layer_pattern)),
        "mamba_num_heads": Pair("mamba_num_heads", hybrid.mamba_heads),
        **same(mamba_head_dim="mamba_head_dim", n_groups="mamba_num_groups", ssm_state_size="mamba_state_dim"),
    },
    defaults=llama.DEFAULTS | {"time_step_min": 0.001},
    fixed_arguments={
        **{name: value for name, value in llama.LLAMA.fixed_arguments.items() if name != "rotary_percent"},
        **{"swiglu": False, "squared_relu": True, "position_embedding_type": "none"},
        "layernorm_epsilon": 1e-5,  # Megatron's mixers have it in their norm, whatever the layers have
    },
    fixed_keys={
        **{"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "conv_kernel": 4, "layer_norm_epsilon": 1e-5},
        "time_step_min": 1e-12,  # Megatron's mixers have no lower limit: this limits nothing, and has a logarithm
        **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias"), False),
        **{"use_conv_bias": True, "num_nextn_predict_layers": 0},
    },
    weights={
        "embedding.word_embeddings.weight": "model.embeddings.weight",
        "output_layer.weight": "lm_head.weight",
        "decoder.final_norm.weight": "model.norm_f.weight",
        **of_layers(_LAYER),
    },
    cuts={"linear_qkv": attention},
    problems_of_arguments=lambda args: _problems(args.hybrid_layer_pattern, "--hybrid-layer-pattern"),
    problems_of_config=lambda settings: _problems(settings[_PATTERN], f"config.json: {_PATTERN}"),
)
