# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The settings that determine a model: Hugging Face's config.json and Megatron's arguments, side by side."""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_async.models import hybrid as patterns
from megatron_async.models.huggingface import deepseek

LLAMA, QWEN3_MOE, QWEN3_NEXT = "LlamaForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM"
NEMOTRON_H, DEEPSEEK_V3 = "NemotronHForCausalLM", "DeepseekV3ForCausalLM"
MODEL_TYPES = {
    LLAMA: "llama",
    QWEN3_MOE: "qwen3_moe",
    QWEN3_NEXT: "qwen3_next",
    NEMOTRON_H: "nemotron_h",
    DEEPSEEK_V3: "deepseek_v3",
}
_WITH_EXPERTS = (QWEN3_MOE, QWEN3_NEXT)

# Key of config.json: destination of Megatron's argument.
_DENSE = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "rope_theta": "rotary_base",
    "rms_norm_eps": "layernorm_epsilon",
    "initializer_range": "init_method_std",
}
_EXPERTS = {
    "num_experts": "num_experts",
    "num_experts_per_tok": "moe_router_topk",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "router_aux_loss_coef": "moe_aux_loss_coeff",
}
_LINEAR = {
    "partial_rotary_factor": "rotary_percent",
    "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
    "full_attention_interval": "linear_attention_freq",
    "linear_num_key_heads": "linear_num_key_heads",
    "linear_key_head_dim": "linear_key_head_dim",
    "linear_num_value_heads": "linear_num_value_heads",
    "linear_value_head_dim": "linear_value_head_dim",
    "linear_conv_kernel_dim": "linear_conv_kernel_dim",
}
_MAMBA = {
    "hybrid_override_pattern": "hybrid_layer_pattern",
    "layer_norm_epsilon": "layernorm_epsilon",
    "mamba_num_heads": "mamba_num_heads",
    "mamba_head_dim": "mamba_head_dim",
    "n_groups": "mamba_num_groups",
    "ssm_state_size": "mamba_state_dim",
}


def _without(*keys: str) -> dict[str, str]:
    return {key: name for key, name in _DENSE.items() if key not in keys}


_SIZES = {
    LLAMA: _DENSE,
    QWEN3_MOE: _DENSE | _EXPERTS,
    QWEN3_NEXT: _DENSE | _EXPERTS | _LINEAR,
    NEMOTRON_H: _without("rope_theta", "rms_norm_eps") | _MAMBA,
    DEEPSEEK_V3: _without("num_key_value_heads", "head_dim", "rms_norm_eps") | deepseek.SIZES,
}
# The same for keys whose argument is the opposite.
_UNTIED = {"tie_word_embeddings": "untie_embeddings_and_output_weights"}
_PRE_SOFTMAX = {"norm_topk_prob": "moe_router_pre_softmax"}
_NEGATED = {name: _UNTIED | (_PRE_SOFTMAX if name in _WITH_EXPERTS else {}) for name in MODEL_TYPES}

# Defaults of transformers for keys that config.json leaves out. Other keys are required.
_COMMON_DEFAULTS = {
    "rope_theta": 10_000.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "router_aux_loss_coef": 0.001,
    "norm_topk_prob": False,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    LLAMA: _COMMON_DEFAULTS,
    NEMOTRON_H: {"initializer_range": 0.02, "tie_word_embeddings": False},
    DEEPSEEK_V3: _COMMON_DEFAULTS | deepseek.DEFAULTS,
    QWEN3_MOE: _COMMON_DEFAULTS | {"num_key_value_heads": 4},
    QWEN3_NEXT: _COMMON_DEFAULTS
    | {"num_key_value_heads": 2, "head_dim": 256, "norm_topk_prob": True, "partial_rotary_factor": 0.25}
    | {"shared_expert_intermediate_size": 512, "full_attention_interval": 4},
}

# Options whose names do not follow from the destination.
_OPTIONS = {
    "layernorm_epsilon": "--norm-epsilon",
    "add_bias_linear": "--disable-bias-linear",
    "layernorm_zero_centered_gamma": "--apply-layernorm-1p",
}


class ConversionProblems(ValueError):
    """Everything that prevents a conversion, one line each."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(problems))


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model that both sides know.

    Attributes:
        name: Hugging Face's class.
        settings: keys of config.json. `vocab_size` is without Megatron's padding; the layers of Qwen3-Next are given by
            `full_attention_interval`, those of Nemotron-H by `hybrid_override_pattern`; "yarn" of DeepSeek-V3 has the
            parameters of that position embedding, or is None.
    """

    name: str
    settings: Mapping[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.settings[key]


def _fixed_arguments(name: str) -> dict[str, Any]:
    """Megatron's arguments that an architecture leaves no choice about, by destination."""
    hybrid, mamba = name == QWEN3_NEXT, name == NEMOTRON_H
    fixed: dict[str, Any] = {
        "normalization": "RMSNorm",
        "swiglu": not mamba,
        "squared_relu": mamba,
        "position_embedding_type": "none" if mamba else "rope",
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "multi_latent_attention": False,
        "qk_layernorm": name in _WITH_EXPERTS,
        "attention_output_gate": hybrid,
        "layernorm_zero_centered_gamma": hybrid,
        "experimental_attention_variant": "gated_delta_net" if hybrid else None,
        "mtp_num_layers": None,
        "rotary_interleaved": False,
        "use_rope_scaling": False,
    }
    if name == DEEPSEEK_V3:
        fixed |= deepseek.FIXED_ARGUMENTS
    if mamba:
        fixed["layernorm_epsilon"] = 1e-5  # Megatron's mixers have it in their norm, whatever the layers have
    elif not hybrid:
        fixed["rotary_percent"] = 1.0
    if name in _WITH_EXPERTS:
        fixed |= {
            "moe_router_score_function": "softmax",
            "moe_layer_freq": 1,
            "moe_router_enable_expert_bias": False,
            "moe_router_num_groups": None,
            "moe_router_topk_scaling_factor": None,
            "moe_shared_expert_gate": hybrid,
        }
    return fixed


def _fixed_keys(name: str) -> dict[str, Any]:
    """Keys of config.json that Megatron leaves no choice about."""
    if name == NEMOTRON_H:
        # Megatron's mixers have no lower limit of dt. This one limits nothing; transformers takes its logarithm.
        fixed = {"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "conv_kernel": 4, "time_step_min": 1e-12}
        biases = ("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias")
        return fixed | dict.fromkeys(biases, False) | {"use_conv_bias": True, "num_nextn_predict_layers": 0}
    fixed = {"hidden_act": "silu", "attention_bias": False}
    if name == DEEPSEEK_V3:
        return fixed | deepseek.FIXED_KEYS
    return fixed | ({"mlp_bias": False} if name == LLAMA else {"decoder_sparse_step": 1, "mlp_only_layers": []})


def from_arguments(args: argparse.Namespace, vocabulary: int) -> Architecture:
    """The architecture of a Megatron model.

    Raises:
        ConversionProblems: the model has a part that none of the known architectures has.
    """
    hybrid = args.experimental_attention_variant == "gated_delta_net"
    name = QWEN3_NEXT if hybrid else QWEN3_MOE if args.num_experts else LLAMA
    name = DEEPSEEK_V3 if args.multi_latent_attention else name
    name = name if args.hybrid_layer_pattern is None else NEMOTRON_H
    if problems := list(_unknown_to_hugging_face(args, name)):
        raise ConversionProblems(problems)
    settings = {key: getattr(args, argument) for key, argument in _SIZES[name].items()}
    settings["vocab_size"] = vocabulary
    if name == NEMOTRON_H:
        pattern = patterns.layers_of(args.hybrid_layer_pattern)
        settings |= {"hybrid_override_pattern": pattern, "mamba_num_heads": patterns.mamba_heads(args)}
    else:
        settings["rope_theta"] = float(args.rotary_base)
    settings |= {key: not getattr(args, argument) for key, argument in _NEGATED[name].items()}
    if name == DEEPSEEK_V3:
        settings |= deepseek.settings_of(args)
    elif not args.group_query_attention:
        settings["num_key_value_heads"] = args.num_attention_heads
    if name in _WITH_EXPERTS and isinstance(args.moe_aux_loss_coeff, list):
        settings["router_aux_loss_coef"] = args.moe_aux_loss_coeff[0]
    return Architecture(name, settings)


def _unknown_to_hugging_face(args: argparse.Namespace, name: str) -> Iterator[str]:
    shared = args.moe_shared_expert_intermediate_size
    if name == NEMOTRON_H and (problems := list(_letters(args.hybrid_layer_pattern, "--hybrid-layer-pattern"))):
        yield from problems
        return
    if name == QWEN3_NEXT and not args.num_experts:
        yield f"no experts: {name} has experts in every layer."
        return
    for argument, value in _fixed_arguments(name).items():
        if getattr(args, argument) != value:
            given = f"--{argument.replace('_', '-')} is {getattr(args, argument)}"
            yield f"{given}; {name} needs {value}, so this model has no such counterpart."
    if name == DEEPSEEK_V3:
        yield from deepseek.problems_of_arguments(args)
    if name == QWEN3_MOE and shared:
        yield f"--moe-shared-expert-intermediate-size: {name} has no shared expert."
    if name == QWEN3_NEXT and not shared:
        yield f"no --moe-shared-expert-intermediate-size: {name} has a shared expert in every layer."
    if name == QWEN3_NEXT and not isinstance(args.linear_attention_freq, int):
        yield f"--linear-attention-freq {args.linear_attention_freq}: only every n-th full layer can be converted."


def _letters(pattern: str, where: str) -> Iterator[str]:
    """Layers of a pattern that cannot be converted, with their positions."""
    of_gpt = "A pattern of a GPT's layers can be converted after `megatron-async convert to-gpt`"
    reasons = {
        "E": f"{NEMOTRON_H} routes by sigmoid scores and always has a shared expert, which is not supported here",
        "G": f"{NEMOTRON_H} has no Gated DeltaNet. {of_gpt}",
        "+": f"{NEMOTRON_H} has no multi-latent attention. {of_gpt}",
    }
    for position, letter in enumerate(patterns.layers_of(pattern)):
        if letter not in "M*-":
            yield f"{where} {pattern}: {letter!r} at position {position}: {reasons.get(letter, 'unknown')}."


def from_config(config: Mapping[str, Any]) -> Architecture:
    """The architecture that a config.json describes; missing keys have the defaults of transformers.

    Raises:
        ConversionProblems: another architecture, a feature of it that Megatron's model would not have, a missing key.
    """
    names = config.get("architectures") or ["none"]
    if len(names) != 1 or names[0] not in MODEL_TYPES:
        raise ConversionProblems(
            [f"config.json: architecture {', '.join(names)}; only {', '.join(MODEL_TYPES)} can be converted."]
        )
    name = names[0]
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    given = {"num_experts": config.get("num_local_experts"), **config, **rotary}
    given = {key: value for key, value in given.items() if value is not None}
    problems = list(_unknown_to_megatron(given, name))
    if name == DEEPSEEK_V3:
        problems += deepseek.problems_of_config({**config, **rotary})
    if name == QWEN3_NEXT and "layer_types" in given:
        given["full_attention_interval"] = _interval(given["layer_types"])
    known = {*_SIZES[name], *_NEGATED[name]}
    defaults = _DEFAULTS[name]
    if {"hidden_size", "num_attention_heads"} <= given.keys():
        heads = given["num_attention_heads"]
        defaults = {"num_key_value_heads": heads, "head_dim": given["hidden_size"] // heads} | defaults
    settings = defaults | given
    problems += [f"config.json: no {key}, which {name} needs." for key in sorted(known - settings.keys())]
    if problems:
        raise ConversionProblems(problems)
    found = {key: settings[key] for key in known}
    if name == DEEPSEEK_V3:
        found |= deepseek.settings_of_config(settings)
    return Architecture(name, found | ({"rope_theta": float(found["rope_theta"])} if "rope_theta" in known else {}))


def _unknown_to_megatron(given: Mapping[str, Any], name: str) -> Iterator[str]:
    fixed = _fixed_keys(name) | ({} if name in (QWEN3_NEXT, NEMOTRON_H) else {"partial_rotary_factor": 1.0})
    if name == NEMOTRON_H:
        given = {"time_step_min": 0.001, **given}  # of transformers
        fixed["layer_norm_epsilon"] = 1e-5
        yield from _letters(given.get("hybrid_override_pattern", ""), "config.json: hybrid_override_pattern")
    for key, value in (fixed | {"mlp_bias": False, "use_sliding_window": False}).items():
        if given.get(key, value) != value:
            yield f"config.json: {key} is {given[key]}; only {value} can be converted."
    kinds = ("default", "yarn") if name == DEEPSEEK_V3 else ("default",)
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in kinds:
        yield f"config.json: position embedding of type {kind}; only {' and '.join(kinds)} can be converted."
    if given.get("rope_theta", 0) != int(given.get("rope_theta", 0)):
        yield f"config.json: rope_theta is {given['rope_theta']}; Megatron's --rotary-base takes whole numbers."
    types = given.get("layer_types")
    if name == QWEN3_NEXT and types is not None:
        if "full_attention" not in types:
            yield "config.json: layer_types has no full_attention layer."
        elif list(types) != _layer_types(len(types), _interval(types)):
            yield f"config.json: layer_types is {types}; only a full_attention layer every n-th can be converted."


def _interval(layer_types: list[str]) -> int:
    return [*layer_types, "full_attention"].index("full_attention") + 1


def _layer_types(layers: int, interval: int) -> list[str]:
    return ["linear_attention" if layer % interval else "full_attention" for layer in range(1, layers + 1)]


def to_config(model: Architecture, dtype: str, end_of_text: int | None) -> dict[str, Any]:
    """The config.json of an architecture.

    Args:
        model: the architecture.
        dtype: name of the weights' type, such as "bfloat16".
        end_of_text: id of the token that ends a document, if known.
    """
    # transformers 5 reads rope_parameters, earlier versions rope_theta.
    rotary = {"rope_type": "default", "rope_theta": model.settings.get("rope_theta")}
    settings = model.settings
    if model.name == DEEPSEEK_V3:
        settings, embedding = deepseek.to_config(settings)
        rotary |= embedding
    config = {
        **settings,
        **_fixed_keys(model.name),
        "architectures": [model.name],
        "model_type": MODEL_TYPES[model.name],
        "dtype": dtype,
        "attention_dropout": 0.0,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "use_cache": True,
    }
    if model.name == QWEN3_NEXT:
        rotary["partial_rotary_factor"] = model["partial_rotary_factor"]
        config["layer_types"] = _layer_types(model["num_hidden_layers"], config.pop("full_attention_interval"))
    if model.name != NEMOTRON_H:
        config["rope_parameters"] = rotary
    return config


def to_arguments(model: Architecture) -> list[str]:
    """Megatron's command-line arguments for an architecture."""
    values = {argument: model[key] for key, argument in _SIZES[model.name].items()}
    values["seq_length"] = model["max_position_embeddings"]
    if model.name == NEMOTRON_H:
        del values["num_layers"]  # it follows from the pattern
    else:
        values["rotary_base"] = int(model["rope_theta"])
    values |= {"attention_dropout": 0.0, "hidden_dropout": 0.0, "group_query_attention": True}
    values |= _fixed_arguments(model.name)
    if model.name == DEEPSEEK_V3:
        values |= deepseek.to_arguments(model.settings)
    values |= {argument: not model[key] for key, argument in _NEGATED[model.name].items()}
    values["add_bias_linear"] = not values["add_bias_linear"]  # its option is the opposite
    if model.name in _WITH_EXPERTS:
        values["moe_router_load_balancing_type"] = "aux_loss"
    if values.get("num_experts"):
        values |= {"moe_router_dtype": "fp32"}
        values |= {"moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True}
    words = []
    for argument, value in values.items():
        # False and None are Megatron's defaults.
        if value is not None and value is not False:
            option = _OPTIONS.get(argument, f"--{argument.replace('_', '-')}")
            words += [option] if value is True else [option, str(value)]
    return words
