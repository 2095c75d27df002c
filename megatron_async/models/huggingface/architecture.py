# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The shapes that a conversion depends on, from Megatron's arguments and from a Hugging Face config.json."""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

LLAMA, QWEN3_MOE, QWEN3_NEXT = "LlamaForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM"
MODEL_TYPES = {LLAMA: "llama", QWEN3_MOE: "qwen3_moe", QWEN3_NEXT: "qwen3_next"}


class ConversionProblems(ValueError):
    """Everything that stands in the way of a conversion, one line each."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(problems))


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model that both sides know.

    Attributes:
        name: Hugging Face's class.
        layers, hidden, heads, groups, head_size, feed_forward: sizes; `groups` are keys and values.
        vocabulary: true size, without Megatron's padding.
        tied: whether embedding and head are one weight.
        rotary_base, rotary_share: of the position embedding.
        epsilon: of the norms.
        context: longest sequence.
        spread: standard deviation of initial weights.
        experts, chosen, expert_size, shared_size: 0 without experts.
        normalized: whether the weights of the chosen experts are made to add up to 1.
        balancing: coefficient of the load-balancing loss.
        full_every: every n-th layer has softmax attention, the others Gated DeltaNet; 1 without linear attention.
        key_heads, key_size, value_heads, value_size, convolution: of Gated DeltaNet.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    groups: int
    head_size: int
    feed_forward: int
    vocabulary: int
    tied: bool
    rotary_base: float
    rotary_share: float
    epsilon: float
    context: int
    spread: float
    experts: int = 0
    chosen: int = 0
    expert_size: int = 0
    shared_size: int = 0
    normalized: bool = True
    balancing: float = 0.0
    full_every: int = 1
    key_heads: int = 0
    key_size: int = 0
    value_heads: int = 0
    value_size: int = 0
    convolution: int = 0

    @property
    def gated_attention(self) -> bool:
        return self.name == QWEN3_NEXT

    @property
    def query_key_norms(self) -> bool:
        return self.name != LLAMA

    def is_linear(self, layer: int) -> bool:
        """Whether a layer, counted from 0, is a Gated DeltaNet one."""
        return (layer + 1) % self.full_every != 0


def from_arguments(args: argparse.Namespace, vocabulary: int) -> Architecture:
    """The architecture of a Megatron model.

    Raises:
        ConversionProblems: the model has something that none of the known architectures has.
    """
    hybrid = args.experimental_attention_variant == "gated_delta_net"
    name = QWEN3_NEXT if hybrid else QWEN3_MOE if args.num_experts else LLAMA
    if problems := list(_unknown_to_hugging_face(args, name)):
        raise ConversionProblems(problems)
    coefficient = args.moe_aux_loss_coeff
    experts: dict[str, Any] = {}
    if args.num_experts:
        experts = {
            "experts": args.num_experts,
            "chosen": args.moe_router_topk,
            "expert_size": args.moe_ffn_hidden_size,
            "shared_size": args.moe_shared_expert_intermediate_size or 0,
            "normalized": not args.moe_router_pre_softmax,
            "balancing": coefficient[0] if isinstance(coefficient, list) else coefficient,
        }
    linear: dict[str, Any] = {}
    if hybrid:
        linear = {
            "full_every": args.linear_attention_freq,
            "key_heads": args.linear_num_key_heads,
            "key_size": args.linear_key_head_dim,
            "value_heads": args.linear_num_value_heads,
            "value_size": args.linear_value_head_dim,
            "convolution": args.linear_conv_kernel_dim,
        }
    return Architecture(
        name=name,
        layers=args.num_layers,
        hidden=args.hidden_size,
        heads=args.num_attention_heads,
        groups=args.num_query_groups if args.group_query_attention else args.num_attention_heads,
        head_size=args.kv_channels,
        feed_forward=args.ffn_hidden_size,
        vocabulary=vocabulary,
        tied=not args.untie_embeddings_and_output_weights,
        rotary_base=float(args.rotary_base),
        rotary_share=args.rotary_percent,
        epsilon=args.layernorm_epsilon,
        context=args.max_position_embeddings,
        spread=args.init_method_std,
        **experts,
        **linear,
    )


def _unknown_to_hugging_face(args: argparse.Namespace, name: str) -> Iterator[str]:
    expected = {
        "normalization": "RMSNorm",
        "swiglu": True,
        "position_embedding_type": "rope",
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "multi_latent_attention": False,
        "qk_layernorm": name != LLAMA,
        "attention_output_gate": name == QWEN3_NEXT,
        "layernorm_zero_centered_gamma": name == QWEN3_NEXT,
        "mtp_num_layers": None,
        "rotary_interleaved": False,
        "use_rope_scaling": False,
    }
    if args.num_experts:
        expected |= {
            "moe_router_score_function": "softmax",
            "moe_layer_freq": 1,
            "moe_router_enable_expert_bias": False,
            "moe_router_num_groups": None,
            "moe_router_topk_scaling_factor": None,
            "moe_shared_expert_gate": name == QWEN3_NEXT,
        }
    for argument, value in expected.items():
        if getattr(args, argument) != value:
            flag = "--" + argument.replace("_", "-")
            yield f"{flag} is {getattr(args, argument)}; {name} needs {value}, so this model has no such counterpart."
    if name != QWEN3_NEXT and args.num_experts and args.moe_shared_expert_intermediate_size:
        yield f"--moe-shared-expert-intermediate-size: {name} has no shared expert."
    if name == QWEN3_NEXT and not args.num_experts:
        yield f"no experts: {name} has experts in every layer."
    if name == QWEN3_NEXT and not isinstance(args.linear_attention_freq, int):
        yield f"--linear-attention-freq {args.linear_attention_freq}: only every n-th full layer can be converted."


def from_config(config: Mapping[str, Any]) -> Architecture:
    """The architecture that a config.json describes.

    Raises:
        ConversionProblems: another architecture, or a feature of it that Megatron's model would not have.
    """
    names = config.get("architectures") or ["none"]
    if len(names) != 1 or names[0] not in MODEL_TYPES:
        raise ConversionProblems(
            [f"config.json: architecture {', '.join(names)}; only {', '.join(MODEL_TYPES)} can be converted."]
        )
    name = names[0]
    if problems := list(_unknown_to_megatron(config, name)):
        raise ConversionProblems(problems)
    rotary = config.get("rope_parameters") or config
    heads = config["num_attention_heads"]
    return Architecture(
        name=name,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=heads,
        groups=config.get("num_key_value_heads", heads),
        head_size=config.get("head_dim") or config["hidden_size"] // heads,
        feed_forward=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        tied=config.get("tie_word_embeddings", False),
        rotary_base=float(rotary.get("rope_theta", 10_000.0)),
        rotary_share=rotary.get("partial_rotary_factor", 0.25 if name == QWEN3_NEXT else 1.0),
        epsilon=config["rms_norm_eps"],
        context=config["max_position_embeddings"],
        spread=config.get("initializer_range", 0.02),
        **(_experts_of(config) if name != LLAMA else {}),
        **(_linear_of(config) if name == QWEN3_NEXT else {}),
    )


def _experts_of(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "experts": config.get("num_experts") or config.get("num_local_experts"),
        "chosen": config["num_experts_per_tok"],
        "expert_size": config["moe_intermediate_size"],
        "shared_size": config.get("shared_expert_intermediate_size", 0),
        "normalized": config.get("norm_topk_prob", False),
        "balancing": config.get("router_aux_loss_coef", 0.0),
    }


def _linear_of(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "full_every": _interval(config),
        "key_heads": config["linear_num_key_heads"],
        "key_size": config["linear_key_head_dim"],
        "value_heads": config["linear_num_value_heads"],
        "value_size": config["linear_value_head_dim"],
        "convolution": config["linear_conv_kernel_dim"],
    }


def _interval(config: Mapping[str, Any]) -> int:
    types = config.get("layer_types")
    if types is None:
        return int(config.get("full_attention_interval", 4))
    return list(types).index("full_attention") + 1


def _unknown_to_megatron(config: Mapping[str, Any], name: str) -> Iterator[str]:
    expected: dict[str, Any] = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    if name != LLAMA:
        expected |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False}
    for key, value in expected.items():
        if config.get(key, value) != value and not (value == [] and config.get(key) is None):
            yield f"config.json: {key} is {config[key]}; only {value} can be converted."
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    if kind != "default":
        yield f"config.json: position embedding of type {kind}; only default can be converted."
    types = config.get("layer_types")
    if name == QWEN3_NEXT and types is not None:
        if "full_attention" not in types:
            yield "config.json: layer_types has no full_attention layer."
        else:
            every = types.index("full_attention") + 1
            regular = [
                "full_attention" if (layer + 1) % every == 0 else "linear_attention" for layer in range(len(types))
            ]
            if list(types) != regular:
                yield f"config.json: layer_types is {types}; only a full_attention layer every n-th can be converted."


def to_config(model: Architecture, dtype: str, end_of_text: int | None) -> dict[str, Any]:
    """The config.json of an architecture.

    Args:
        model: the architecture.
        dtype: name of the weights' type, such as "bfloat16".
        end_of_text: id of the token that ends a document, if known.
    """
    config: dict[str, Any] = {
        "architectures": [model.name],
        "model_type": MODEL_TYPES[model.name],
        "dtype": dtype,
        "vocab_size": model.vocabulary,
        "hidden_size": model.hidden,
        "intermediate_size": model.feed_forward,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.groups,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": model.context,
        "initializer_range": model.spread,
        "rms_norm_eps": model.epsilon,
        "tie_word_embeddings": model.tied,
        "attention_bias": False,
        "attention_dropout": 0.0,
        # The first form is read by transformers 5, the second by earlier ones.
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rotary_base},
        "rope_theta": model.rotary_base,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "use_cache": True,
    }
    if model.name == LLAMA:
        return config | {"mlp_bias": False}
    config |= {
        "num_experts": model.experts,
        "num_experts_per_tok": model.chosen,
        "moe_intermediate_size": model.expert_size,
        "norm_topk_prob": model.normalized,
        "router_aux_loss_coef": model.balancing,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    if model.name == QWEN3_NEXT:
        config["rope_parameters"]["partial_rotary_factor"] = model.rotary_share
        kinds = ["linear_attention" if model.is_linear(layer) else "full_attention" for layer in range(model.layers)]
        config |= {
            "partial_rotary_factor": model.rotary_share,
            "shared_expert_intermediate_size": model.shared_size,
            "layer_types": kinds,
            "linear_num_key_heads": model.key_heads,
            "linear_key_head_dim": model.key_size,
            "linear_num_value_heads": model.value_heads,
            "linear_value_head_dim": model.value_size,
            "linear_conv_kernel_dim": model.convolution,
        }
    return config


def to_arguments(model: Architecture) -> list[str]:
    """Megatron's command-line arguments for an architecture."""
    values: dict[str, Any] = {
        "num-layers": model.layers,
        "hidden-size": model.hidden,
        "ffn-hidden-size": model.feed_forward,
        "num-attention-heads": model.heads,
        "num-query-groups": model.groups,
        "kv-channels": model.head_size,
        "seq-length": model.context,
        "max-position-embeddings": model.context,
        "rotary-base": int(model.rotary_base),
        "rotary-percent": model.rotary_share,
        "norm-epsilon": model.epsilon,
        "init-method-std": model.spread,
        "vocab-size": model.vocabulary,
        "normalization": "RMSNorm",
        "position-embedding-type": "rope",
        "attention-dropout": 0.0,
        "hidden-dropout": 0.0,
    }
    flags = ["group-query-attention", "swiglu", "disable-bias-linear"]
    if not model.tied:
        flags.append("untie-embeddings-and-output-weights")
    if model.query_key_norms:
        flags.append("qk-layernorm")
    if model.experts:
        flags.append("moe-grouped-gemm")
        values |= {
            "num-experts": model.experts,
            "moe-router-topk": model.chosen,
            "moe-ffn-hidden-size": model.expert_size,
            "moe-router-dtype": "fp32",
            "moe-router-load-balancing-type": "aux_loss",
            "moe-aux-loss-coeff": model.balancing,
            "moe-token-dispatcher-type": "alltoall",
        }
        if not model.normalized:
            flags.append("moe-router-pre-softmax")
    if model.name == QWEN3_NEXT:
        flags += ["attention-output-gate", "apply-layernorm-1p", "moe-shared-expert-gate"]
        values |= {
            "moe-shared-expert-intermediate-size": model.shared_size,
            "experimental-attention-variant": "gated_delta_net",
            "linear-attention-freq": model.full_every,
            "linear-num-key-heads": model.key_heads,
            "linear-key-head-dim": model.key_size,
            "linear-num-value-heads": model.value_heads,
            "linear-value-head-dim": model.value_size,
            "linear-conv-kernel-dim": model.convolution,
        }
    pairs = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    return pairs + [f"--{name}" for name in flags]
