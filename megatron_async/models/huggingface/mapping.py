# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The table between Megatron's and Hugging Face's weights.

A rule turns one weight of Megatron's, as a single process holds it, into one or more of Hugging Face's: it cuts and
reorders rows. No number changes, so a round trip is bit-equal.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from megatron_async.models.huggingface.architecture import DEEPSEEK_V3, NEMOTRON_H, QWEN3_NEXT, Architecture

ROUTER_BIAS = "e_score_correction_bias"
"""Hugging Face's name of the bias by which a router chooses experts; it is float32 in every folder."""

Tensors = tuple[torch.Tensor, ...]
Split = Callable[[torch.Tensor, Architecture], Tensors]


@dataclass(frozen=True, slots=True)
class Rule:
    """How a weight of Megatron's becomes weights of Hugging Face's.

    Attributes:
        names: Hugging Face's.
        cut: cuts and reorders rows.
        model: the architecture.
    """

    names: tuple[str, ...]
    cut: Split
    model: Architecture

    def split(self, weight: torch.Tensor) -> Tensors:
        """Megatron's weight [rows, ...] to its counterparts."""
        return self.cut(weight, self.model)

    def join(self, weights: Tensors) -> torch.Tensor:
        """The inverse of `split`."""
        rows = torch.cat(weights)
        order = torch.cat(self.split(torch.arange(len(rows)).unsqueeze(1))).flatten()
        return rows[order.argsort()]


def _whole(weight: torch.Tensor, model: Architecture) -> Tensors:
    return (weight,)


def _gate_and_up(weight: torch.Tensor, model: Architecture) -> Tensors:
    return weight.chunk(2)


def _attention(weight: torch.Tensor, model: Architecture) -> Tensors:
    """Megatron's rows, for each group: its query heads, their gates if there are any, the key, the value.

    Hugging Face's query rows are by head, each followed by its gate.
    """
    groups = model["num_key_value_heads"]
    per_group = model["num_attention_heads"] // groups
    gates = per_group if model.name == QWEN3_NEXT else 0
    heads = weight.unflatten(0, (groups, per_group + gates + 2, model["head_dim"]))
    query, gate, key, value = heads.split([per_group, gates, 1, 1], dim=1)
    if gates:
        query = torch.stack([query, gate], dim=2)
    return tuple(part.reshape(-1, weight.shape[1]) for part in (query, key, value))


def _delta_net(weight: torch.Tensor, model: Architecture) -> Tensors:
    """Megatron's rows: all queries, keys, values, output gates, writing strengths (beta), decays (alpha).

    Hugging Face's: for each key head its query, key, values and gates; and, apart, its strengths and decays.
    """
    heads = model["linear_num_value_heads"]
    keys = model["linear_num_key_heads"] * model["linear_key_head_dim"]
    values = heads * model["linear_value_head_dim"]
    parts = weight.split([keys, keys, values, values, heads, heads])
    by_head = [part.unflatten(0, (model["linear_num_key_heads"], -1)) for part in parts]
    return torch.cat(by_head[:4], dim=1).flatten(0, 1), torch.cat(by_head[4:], dim=1).flatten(0, 1)


_CUTS: dict[str, Split] = {"linear_qkv": _attention, "in_proj": _delta_net, "linear_fc1": _gate_and_up}
"""Modules whose weights have several counterparts."""


def _feed_forward(megatron: str, there: str) -> dict[str, str]:
    return {
        f"{megatron}.linear_fc1.weight": f"{there}.gate_proj.weight {there}.up_proj.weight",
        f"{megatron}.linear_fc2.weight": f"{there}.down_proj.weight",
    }


def _of_layers(table: Mapping[str, str]) -> dict[str, str]:
    return {
        f"decoder.layers.{{layer}}.{name}": " ".join(f"model.layers.{{layer}}.{text}" for text in there.split())
        for name, there in table.items()
    }


# Megatron's name: Hugging Face's names.
_MODEL = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
}
_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.weight": " ".join(f"self_attn.{name}_proj.weight" for name in "qkv"),
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.in_proj.layer_norm_weight": "input_layernorm.weight",
    "self_attention.in_proj.weight": "linear_attn.in_proj_qkvz.weight linear_attn.in_proj_ba.weight",
    "self_attention.conv1d.weight": "linear_attn.conv1d.weight",
    "self_attention.A_log": "linear_attn.A_log",
    "self_attention.dt_bias": "linear_attn.dt_bias",
    "self_attention.out_norm.weight": "linear_attn.norm.weight",
    "self_attention.out_proj.weight": "linear_attn.out_proj.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
    **_feed_forward("mlp", "mlp"),
    **_feed_forward("mlp.shared_experts", "mlp.shared_expert"),
    **_feed_forward("mlp.experts.local_experts.{expert}", "mlp.experts.{expert}"),
}
_LATENT_LAYER = _LAYER | {
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_a_layernorm.weight",
    "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
    "mlp.router.expert_bias": f"mlp.gate.{ROUTER_BIAS}",
    **_feed_forward("mlp.shared_experts", "mlp.shared_experts"),
}
_NEMOTRON_H = {
    "embedding.word_embeddings.weight": "model.embeddings.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_norm.weight": "model.norm_f.weight",
    **_of_layers(
        {
            **dict.fromkeys(("norm.weight", "input_layernorm.weight", "pre_mlp_layernorm.weight"), "norm.weight"),
            **{f"mixer.conv1d_{name}": f"mixer.conv1d.{name}" for name in ("weight", "bias")},
            **{f"mixer.{name}": f"mixer.{name}" for name in ("A_log", "D", "dt_bias", "norm.weight")},
            **{f"mixer.{name}_proj.weight": f"mixer.{name}_proj.weight" for name in ("in", "out")},
            "self_attention.linear_qkv.weight": " ".join(f"mixer.{name}_proj.weight" for name in "qkv"),
            "self_attention.linear_proj.weight": "mixer.o_proj.weight",
            "mlp.linear_fc1.weight": "mixer.up_proj.weight",
            "mlp.linear_fc2.weight": "mixer.down_proj.weight",
        }
    ),
}
_TABLES = {NEMOTRON_H: _NEMOTRON_H, DEEPSEEK_V3: _MODEL | _of_layers(_LATENT_LAYER)}
_OTHERS = _MODEL | _of_layers(_LAYER)


def rules(names: Iterable[str], model: Architecture) -> Iterator[tuple[str, Rule]]:
    """Each of Megatron's names with its rule.

    Raises:
        ValueError: a name without a rule.
    """
    for name in names:
        numbers = dict(re.findall(r"(layer|expert)s\.(\d+)", name))
        pattern = re.sub(r"(layer|expert)s\.\d+", r"\1s.{\1}", name)
        table = _TABLES.get(model.name, _OTHERS)
        if pattern not in table:
            raise ValueError(f"parameter {name}: has no counterpart in {model.name}")
        there = table[pattern].format(**numbers).split()
        yield name, Rule(tuple(there), _whole if len(there) == 1 else _CUTS[name.split(".")[-2]], model)
