# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3's settings that are no plain pairs of a key and an argument.

Its experts begin after a number of dense layers, choose by sigmoid scores and a bias, and have a shared expert. Its
position embedding is rotary, of the default type or YaRN.
"""

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

SIZES = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
}
"""Key of config.json -> destination of Megatron's argument."""
FIXED_ARGUMENTS = {
    "multi_latent_attention": True,
    "group_query_attention": False,
    "qk_layernorm": True,
    "layernorm_epsilon": 1e-6,  # that of the latents' norms in transformers, whatever the layers have
}
FIXED_KEYS = {"rms_norm_eps": 1e-6, "rope_interleave": True, "norm_topk_prob": True}

_EXPERTS = {
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "moe_router_topk",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "n_group": "moe_router_num_groups",
    "topk_group": "moe_router_group_topk",
    "routed_scaling_factor": "moe_router_topk_scaling_factor",
}
_FIXED_WITH_EXPERTS = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_gate": False,
}
_DENSE_LAYERS, _SHARED = "first_k_dense_replace", "n_shared_experts"
_EXPERT_DEFAULTS = {
    **{"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_group": 8, "topk_group": 4},
    **{"routed_scaling_factor": 2.5, _SHARED: 1},
}
DEFAULTS = {
    **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    _DENSE_LAYERS: 3,
    **_EXPERT_DEFAULTS,
}
"""Of transformers."""

_YARN = {"factor": "rotary_scaling_factor", "mscale": "mscale", "mscale_all_dim": "mscale_all_dim"}
_FIXED_YARN = {"original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}  # Megatron has no options


def problems_of_arguments(args: argparse.Namespace) -> Iterator[str]:
    """Parts of a model with multi-latent attention that DeepSeek-V3 has not."""
    if args.q_lora_rank is None:
        yield "no --q-lora-rank: DeepseekV3ForCausalLM and Megatron's layer differ in the norm before such queries."
    mscales = args.mscale, args.mscale_all_dim
    if args.rope_type == "yarn" and not all(mscales) and mscales != (1, 0):
        yield f"--mscale {args.mscale} --mscale-all-dim {args.mscale_all_dim}: transformers reads them together or not."
    if args.rope_type == "rope" and args.rotary_scaling_factor != 1:
        yield f"--rotary-scaling-factor {args.rotary_scaling_factor} with --rope-type rope: give --rope-type yarn."
    if not args.num_experts:
        return
    for name, value in _FIXED_WITH_EXPERTS.items():
        if getattr(args, name) != value:
            yield f"--{name.replace('_', '-')} is {getattr(args, name)}; DeepseekV3ForCausalLM needs {value}."
    shared = args.moe_shared_expert_intermediate_size
    if not shared or shared % args.moe_ffn_hidden_size:
        yield (
            f"--moe-shared-expert-intermediate-size {shared}: DeepseekV3ForCausalLM has shared experts, together a "
            f"multiple of --moe-ffn-hidden-size {args.moe_ffn_hidden_size}."
        )
    if _dense_layers(args) is None:
        yield f"--moe-layer-freq {args.moe_layer_freq}: DeepseekV3ForCausalLM has its dense layers first."
    yield from _routing(args.moe_router_topk, args.moe_router_num_groups, args.moe_router_group_topk)


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Keys of config.json beside the plain pairs; "yarn" has its parameters, or is None."""
    yarn = {key: float(getattr(args, name)) for key, name in _YARN.items()} if args.rope_type == "yarn" else None
    if not args.num_experts:
        return _dense(args.num_layers) | {"yarn": yarn}
    experts = {key: getattr(args, name) for key, name in _EXPERTS.items()}
    for key in ("n_group", "topk_group"):
        experts[key] = experts[key] or 1
    experts["routed_scaling_factor"] = float(experts["routed_scaling_factor"] or 1)
    shared = args.moe_shared_expert_intermediate_size // args.moe_ffn_hidden_size
    return experts | {_DENSE_LAYERS: _dense_layers(args), _SHARED: shared, "yarn": yarn}


def problems_of_config(given: Mapping[str, Any]) -> Iterator[str]:
    """Parts of a config.json that Megatron's model would not have; `given` has the position embedding's keys too."""
    if given.get("q_lora_rank", 0) is None:
        yield "config.json: q_lora_rank is null; Megatron's layer has another norm before queries without a latent."
    given = {key: value for key, value in given.items() if value is not None}
    if given.get("num_key_value_heads", given.get("num_attention_heads")) != given.get("num_attention_heads"):
        yield f"config.json: num_key_value_heads is {given['num_key_value_heads']}; only num_attention_heads."
    if given.get("rope_type", given.get("type")) == "yarn":
        yield from _yarn_problems(given)
    settings = {**DEFAULTS, **given}
    if settings[_DENSE_LAYERS] < given.get("num_hidden_layers", 0):
        yield from _routing(settings["num_experts_per_tok"], settings["n_group"], settings["topk_group"])
        if settings[_SHARED] < 1:
            yield f"config.json: {_SHARED} is {settings[_SHARED]}; at least 1 can be converted."


def settings_of_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As `settings_of`, from a config.json without problems."""
    yarn = None
    if settings.get("rope_type", settings.get("type")) == "yarn":
        scaled = bool(settings.get("mscale_all_dim"))  # without it transformers does not read mscale
        mscales = (settings["mscale"], settings["mscale_all_dim"]) if scaled else (1, 0)
        yarn = dict(zip(_YARN, map(float, (settings["factor"], *mscales)), strict=True))
    if settings[_DENSE_LAYERS] >= settings["num_hidden_layers"]:
        return _dense(settings["num_hidden_layers"]) | {"yarn": yarn}
    return {key: settings[key] for key in (*_EXPERTS, _DENSE_LAYERS, _SHARED)} | {"yarn": yarn}


def to_config(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keys of config.json, and the type and parameters of its rotary position embedding."""
    keys = {key: value for key, value in settings.items() if value is not None and key != "yarn"}
    keys |= {"num_key_value_heads": settings["num_attention_heads"], "num_nextn_predict_layers": 0}
    yarn = settings["yarn"]
    return keys, {"rope_type": "default"} if yarn is None else {"rope_type": "yarn", **yarn, **_FIXED_YARN}


def to_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron's arguments beside the plain pairs, by destination."""
    values: dict[str, Any] = {"rope_type": "rope"}
    if (yarn := settings["yarn"]) is not None:
        values = {"rope_type": "yarn"} | {name: yarn[key] for key, name in _YARN.items()}
    if settings["n_routed_experts"] is None:
        return values
    values |= {name: settings[key] for key, name in _EXPERTS.items()} | _FIXED_WITH_EXPERTS
    if settings["n_group"] == 1:
        values |= dict.fromkeys(("moe_router_num_groups", "moe_router_group_topk"))
    dense, layers = settings[_DENSE_LAYERS], settings["num_hidden_layers"]
    return values | {
        "moe_shared_expert_intermediate_size": settings[_SHARED] * settings["moe_intermediate_size"],
        "moe_layer_freq": f"[0]*{dense}+[1]*{layers - dense}",
        "moe_router_load_balancing_type": "none",  # config.json has no strength of a loss; the bias balances
    }


def _dense(layers: int) -> dict[str, Any]:
    return dict.fromkeys(_EXPERT_DEFAULTS) | {_DENSE_LAYERS: layers}


def _dense_layers(args: argparse.Namespace) -> int | None:
    """The number of dense layers if these come first."""
    if args.moe_layer_freq == 1:
        return 0
    if isinstance(args.moe_layer_freq, int):
        return None
    layers = list(args.moe_layer_freq)
    return layers.count(0) if layers == sorted(layers) else None


def _routing(chosen: int, groups: int | None, chosen_groups: int | None) -> Iterator[str]:
    """Differences between the two routers, by the number of experts and groups of a token."""
    if chosen < 2:
        yield f"{chosen} expert for each token: Megatron does not normalize its weight. At least 2 can be converted."
    if (groups or 1) > 1 and chosen // (chosen_groups or 1) != 2:
        yield (
            f"{chosen} experts from {chosen_groups} of {groups} groups: DeepseekV3ForCausalLM chooses groups by their "
            f"two best experts, Megatron by {chosen} // {chosen_groups} = {chosen // (chosen_groups or 1)}."
        )


def _yarn_problems(given: Mapping[str, Any]) -> Iterator[str]:
    if "attention_factor" in given:
        yield "config.json: attention_factor; Megatron takes it from mscale and mscale_all_dim."
    if "factor" not in given:
        yield "config.json: no factor of YaRN."
    for key, value in _FIXED_YARN.items():
        if given.get(key, value) != value:
            yield f"config.json: {key} is {given[key]}; only {value} can be converted."
    if given.get("mscale_all_dim") and not given.get("mscale"):
        yield "config.json: mscale_all_dim without mscale; Megatron takes the two together."
