# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3: multi-latent attention, rotary positions (or YaRN's). After a number of dense layers come experts that
are chosen by sigmoid scores and a bias, beside shared ones."""

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from megatron_async.models.huggingface.families import llama
from megatron_async.models.huggingface.families.family import Family, Pair, Settings, same
from megatron_async.models.huggingface.weights import ROUTER_BIAS, gate_and_up, gated_feed_forward, of_layers

_NAME = "DeepseekV3ForCausalLM"
_DENSE_LAYERS, _SHARED = "first_k_dense_replace", "n_shared_experts"
_YARN = {"factor": "rotary_scaling_factor", "mscale": "mscale", "mscale_all_dim": "mscale_all_dim"}
_FIXED_YARN = {"original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}  # Megatron has no options
_LAYER = llama.LAYER | {
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_a_layernorm.weight",
    "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": f"mlp.gate.{ROUTER_BIAS}",
    **gated_feed_forward("mlp.shared_experts", "mlp.shared_experts"),
    **gated_feed_forward("mlp.experts.local_experts.{expert}", "mlp.experts.{expert}"),
}


def _dense_layers(args: Namespace) -> int | None:
    """The number of dense layers if these come first."""
    if not args.num_experts:
        return int(args.num_layers)
    if isinstance(args.moe_layer_freq, int):
        return 0 if args.moe_layer_freq == 1 else None
    layers = list(args.moe_layer_freq)
    return layers.count(0) if layers == sorted(layers) else None


def _layer_pattern(settings: Settings) -> str | None:
    dense, layers = settings[_DENSE_LAYERS], settings["num_hidden_layers"]
    return f"[0]*{dense}+[1]*{layers - dense}" if dense < layers else None


def _groups(key: str, argument: str) -> dict[str, Pair]:
    """Megatron has no groups of experts where config.json has one."""
    return {
        key: Pair(
            argument, lambda args: getattr(args, argument) or 1, lambda to: None if to["n_group"] == 1 else to[key]
        )
    }


_EXPERTS = {
    **same(n_routed_experts="num_experts", num_experts_per_tok="moe_router_topk"),
    "moe_intermediate_size": Pair("moe_ffn_hidden_size"),
    **_groups("n_group", "moe_router_num_groups"),
    **_groups("topk_group", "moe_router_group_topk"),
    "routed_scaling_factor": Pair(
        "moe_router_topk_scaling_factor", lambda args: float(args.moe_router_topk_scaling_factor or 1)
    ),
    _SHARED: Pair(
        "moe_shared_expert_intermediate_size",
        lambda args: (args.moe_shared_expert_intermediate_size or 0) // (args.moe_ffn_hidden_size or 1),
        lambda settings: settings[_SHARED] and settings[_SHARED] * settings["moe_intermediate_size"],
    ),
}


def _normalize(settings: dict[str, Any]) -> None:
    if settings["rope_type"] != "yarn":
        settings |= dict.fromkeys(_YARN)
    elif not settings["mscale_all_dim"]:
        settings |= {"mscale": 1.0, "mscale_all_dim": 0.0}  # without the second transformers does not read the first
    if settings[_DENSE_LAYERS] is not None and settings[_DENSE_LAYERS] >= settings["num_hidden_layers"]:
        settings |= dict.fromkeys(_EXPERTS) | {_DENSE_LAYERS: settings["num_hidden_layers"]}


def _routing(chosen: int, groups: int | None, chosen_groups: int | None) -> Iterator[str]:
    """Differences between the two routers, by the number of experts and groups of a token."""
    if chosen < 2:
        yield f"{chosen} expert for each token: Megatron does not normalize its weight. At least 2 can be converted."
    if (groups or 1) > 1 and chosen // (chosen_groups or 1) != 2:
        yield (
            f"{chosen} experts from {chosen_groups} of {groups} groups: {_NAME} chooses groups by their two best "
            f"experts, Megatron by {chosen} // {chosen_groups} = {chosen // (chosen_groups or 1)}."
        )


def _problems_of_arguments(args: Namespace) -> Iterator[str]:
    if args.q_lora_rank is None:
        yield f"no --q-lora-rank: {_NAME} and Megatron's layer differ in the norm before such queries."
    mscales = args.mscale, args.mscale_all_dim
    if args.rope_type == "yarn" and not all(mscales) and mscales != (1, 0):
        yield f"--mscale {args.mscale} --mscale-all-dim {args.mscale_all_dim}: transformers reads them together or not."
    if args.rope_type == "rope" and args.rotary_scaling_factor != 1:
        yield f"--rotary-scaling-factor {args.rotary_scaling_factor} with --rope-type rope: give --rope-type yarn."
    if not args.num_experts:
        return
    shared, width = args.moe_shared_expert_intermediate_size, args.moe_ffn_hidden_size
    if not shared or shared % width:
        yield (
            f"--moe-shared-expert-intermediate-size {shared}: {_NAME} has shared experts, together a multiple of "
            f"--moe-ffn-hidden-size {width}."
        )
    if _dense_layers(args) is None:
        yield f"--moe-layer-freq {args.moe_layer_freq}: {_NAME} has its dense layers first."
    yield from _routing(args.moe_router_topk, args.moe_router_num_groups, args.moe_router_group_topk)


def _problems_of_config(settings: Settings) -> Iterator[str]:
    if settings["q_lora_rank"] is None:
        yield "config.json: q_lora_rank is null; Megatron's layer has another norm before queries without a latent."
    heads = settings["num_attention_heads"]
    if settings.get("num_key_value_heads", heads) != heads:
        yield f"config.json: num_key_value_heads is {settings['num_key_value_heads']}; only num_attention_heads."
    if settings["rope_type"] not in ("default", "yarn"):
        yield f"config.json: position embedding of type {settings['rope_type']}; only default and yarn."
    if settings["rope_type"] == "yarn":
        if "attention_factor" in settings:
            yield "config.json: attention_factor; Megatron takes it from mscale and mscale_all_dim."
        if settings["factor"] is None:
            yield "config.json: no factor of YaRN."
        for key, value in _FIXED_YARN.items():
            if settings.get(key, value) != value:
                yield f"config.json: {key} is {settings[key]}; only {value} can be converted."
        if settings["mscale_all_dim"] and not settings["mscale"]:
            yield "config.json: mscale_all_dim without mscale; Megatron takes the two together."
    if settings["n_routed_experts"]:
        yield from _routing(settings["num_experts_per_tok"], settings["n_group"], settings["topk_group"])
        if settings[_SHARED] < 1:
            yield f"config.json: {_SHARED} is {settings[_SHARED]}; at least 1 can be converted."


def _complete(config: dict[str, Any], settings: Settings) -> None:
    yarn = {key: value for key in _YARN if (value := config.pop(key, None)) is not None}
    config["rope_parameters"] |= {"rope_type": config.pop("rope_type"), **yarn, **(_FIXED_YARN if yarn else {})}
    config |= {"num_key_value_heads": settings["num_attention_heads"], "num_nextn_predict_layers": 0}


DEEPSEEK_V3 = Family(
    name=_NAME,
    model_type="deepseek_v3",
    describes=lambda args: bool(args.multi_latent_attention),
    pairs={
        **llama.SIZES,
        **llama.ROTARY,
        "rope_type": Pair(
            "rope_type",
            lambda args: "yarn" if args.rope_type == "yarn" else "default",
            lambda settings: "yarn" if settings["rope_type"] == "yarn" else "rope",
        ),
        **same(**_YARN),
        **same(qk_nope_head_dim="qk_head_dim", qk_rope_head_dim="qk_pos_emb_head_dim", v_head_dim="v_head_dim"),
        **same(q_lora_rank="q_lora_rank", kv_lora_rank="kv_lora_rank"),
        **_EXPERTS,
        _DENSE_LAYERS: Pair("moe_layer_freq", _dense_layers, _layer_pattern),
    },
    defaults={
        **{"rope_theta": 10_000.0, "initializer_range": 0.02, "tie_word_embeddings": False, "rope_type": "default"},
        **{"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
        "q_lora_rank": lambda config: None if "q_lora_rank" in config else 1536,
        **{"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_group": 8},
        **{"topk_group": 4, "routed_scaling_factor": 2.5, _SHARED: 1, _DENSE_LAYERS: 3},
        **dict.fromkeys(_YARN),
    },
    fixed_arguments={
        **llama.LLAMA.fixed_arguments,
        **{"multi_latent_attention": True, "group_query_attention": False, "qk_layernorm": True},
        "layernorm_epsilon": 1e-6,  # that of the latents' norms in transformers, whatever the layers have
    },
    fixed_with_experts={
        **{"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        "moe_shared_expert_gate": False,
    },
    fixed_keys={
        **{"hidden_act": "silu", "attention_bias": False, "rms_norm_eps": 1e-6},
        **{"rope_interleave": True, "norm_topk_prob": True},
    },
    weights=llama.MODEL | of_layers(_LAYER),
    cuts={"linear_fc1": gate_and_up},
    problems_of_arguments=_problems_of_arguments,
    problems_of_config=_problems_of_config,
    normalize=_normalize,
    complete=_complete,
)
