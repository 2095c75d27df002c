# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The table between Megatron's and Hugging Face's weights.

A rule turns one weight of Megatron's (as a single process holds it) into one or more of Hugging Face's by cutting and
reordering rows, and back; no number changes, so a round trip is bit-equal.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from megatron_async.models.huggingface.architecture import Architecture

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table.

    Attributes:
        megatron: pattern of a parameter's name in the whole model; its groups are layer and expert.
        hugging_face: names of its counterparts, with {0} for the layer and {1} for the expert.
        split: Megatron's weight to its counterparts.
        join: the counterparts to Megatron's weight.
    """

    megatron: str
    hugging_face: tuple[str, ...]
    split: Callable[[torch.Tensor], Tensors]
    join: Callable[[Tensors], torch.Tensor]


def _same(weight: torch.Tensor) -> Tensors:
    return (weight,)


def _only(weights: Tensors) -> torch.Tensor:
    return weights[0]


def _halves(weight: torch.Tensor) -> Tensors:
    """Gate and up projection."""
    return weight.chunk(2)


def _stack(weights: Tensors) -> torch.Tensor:
    return torch.cat(weights)


def rules(model: Architecture) -> list[Rule]:
    """The table of an architecture; the first row that matches a name holds."""
    layer, attention = r"decoder\.layers\.(\d+)\.", r"decoder\.layers\.(\d+)\.self_attention\."
    there = "model.layers.{0}."
    table = [
        _renamed(r"embedding\.word_embeddings\.weight", "model.embed_tokens.weight"),
        _renamed(r"output_layer\.weight", "lm_head.weight"),
        _renamed(r"decoder\.final_layernorm\.weight", "model.norm.weight"),
        _renamed(layer + r"input_layernorm\.weight", there + "input_layernorm.weight"),
        _renamed(layer + r"pre_mlp_layernorm\.weight", there + "post_attention_layernorm.weight"),
        Rule(
            attention + r"linear_qkv\.weight",
            tuple(f"{there}self_attn.{name}_proj.weight" for name in "qkv"),
            lambda weight: split_attention(weight, model),
            lambda weights: join_attention(weights, model),
        ),
        _renamed(attention + r"linear_proj\.weight", there + "self_attn.o_proj.weight"),
        _renamed(attention + r"q_layernorm\.weight", there + "self_attn.q_norm.weight"),
        _renamed(attention + r"k_layernorm\.weight", there + "self_attn.k_norm.weight"),
        _renamed(attention + r"in_proj\.layer_norm_weight", there + "input_layernorm.weight"),
        Rule(
            attention + r"in_proj\.weight",
            (there + "linear_attn.in_proj_qkvz.weight", there + "linear_attn.in_proj_ba.weight"),
            lambda weight: split_delta_net(weight, model),
            lambda weights: join_delta_net(weights, model),
        ),
        _renamed(attention + r"conv1d\.weight", there + "linear_attn.conv1d.weight"),
        _renamed(attention + r"A_log", there + "linear_attn.A_log"),
        _renamed(attention + r"dt_bias", there + "linear_attn.dt_bias"),
        _renamed(attention + r"out_norm\.weight", there + "linear_attn.norm.weight"),
        _renamed(attention + r"out_proj\.weight", there + "linear_attn.out_proj.weight"),
        _renamed(layer + r"mlp\.router\.weight", there + "mlp.gate.weight"),
        _renamed(layer + r"mlp\.shared_experts\.gate_weight", there + "mlp.shared_expert_gate.weight"),
    ]
    for block, names in (
        (r"mlp\.", "mlp."),
        (r"mlp\.shared_experts\.", "mlp.shared_expert."),
        (r"mlp\.experts\.local_experts\.(\d+)\.", "mlp.experts.{1}."),
    ):
        gate_up = (f"{there}{names}gate_proj.weight", f"{there}{names}up_proj.weight")
        table.append(Rule(layer + block + r"linear_fc1\.weight", gate_up, _halves, _stack))
        table.append(_renamed(layer + block + r"linear_fc2\.weight", f"{there}{names}down_proj.weight"))
    return table


def _renamed(megatron: str, hugging_face: str) -> Rule:
    return Rule(megatron, (hugging_face,), _same, _only)


def matched(names: Iterable[str], model: Architecture) -> Iterator[tuple[str, tuple[str, ...], Rule]]:
    """For each of Megatron's names its counterparts' names and the rule.

    Raises:
        ValueError: a name that no rule knows.
    """
    table = [(re.compile(rule.megatron), rule) for rule in rules(model)]
    for name in names:
        for pattern, rule in table:
            if match := pattern.fullmatch(name):
                yield name, tuple(text.format(*match.groups()) for text in rule.hugging_face), rule
                break
        else:
            raise ValueError(f"parameter {name}: has no counterpart in {model.name}")


def split_attention(weight: torch.Tensor, model: Architecture) -> Tensors:
    """Megatron's rows, for each group: its query heads, their gates if there are any, the key, the value.

    Hugging Face's query rows are by head, each followed by its gate.
    """
    per_group = model.heads // model.groups
    gates = per_group if model.gated_attention else 0
    heads = weight.unflatten(0, (model.groups, per_group + gates + 2, model.head_size))
    query, gate, key, value = heads.split([per_group, gates, 1, 1], dim=1)
    if gates:
        query = torch.stack([query, gate], dim=2)
    return tuple(part.reshape(-1, weight.shape[1]) for part in (query, key, value))


def join_attention(weights: Tensors, model: Architecture) -> torch.Tensor:
    """The inverse of `split_attention`."""
    query, key, value = weights
    size, columns, per_group = model.head_size, query.shape[1], model.heads // model.groups
    if model.gated_attention:
        query = query.view(model.groups, per_group, 2, size, columns).transpose(1, 2).flatten(1, 2)
    else:
        query = query.view(model.groups, per_group, size, columns)
    pair = [part.view(model.groups, 1, size, columns) for part in (key, value)]
    return torch.cat([query, *pair], dim=1).reshape(-1, columns)


def split_delta_net(weight: torch.Tensor, model: Architecture) -> Tensors:
    """Megatron's rows: all queries, keys, values, output gates, writing strengths (beta), decays (alpha).

    Hugging Face's: for each key head its query, key, values and gates; and, apart, its strengths and decays.
    """
    key_heads, per_key = model.key_heads, model.value_heads // model.key_heads
    keys, values, heads = key_heads * model.key_size, model.value_heads * model.value_size, model.value_heads
    query, key, value, gate, beta, alpha = weight.split([keys, keys, values, values, heads, heads])
    qkvz = [
        query.unflatten(0, (key_heads, model.key_size)),
        key.unflatten(0, (key_heads, model.key_size)),
        value.unflatten(0, (key_heads, per_key * model.value_size)),
        gate.unflatten(0, (key_heads, per_key * model.value_size)),
    ]
    ba = [beta.unflatten(0, (key_heads, per_key)), alpha.unflatten(0, (key_heads, per_key))]
    return torch.cat(qkvz, dim=1).flatten(0, 1), torch.cat(ba, dim=1).flatten(0, 1)


def join_delta_net(weights: Tensors, model: Architecture) -> torch.Tensor:
    """The inverse of `split_delta_net`."""
    qkvz, ba = (weight.unflatten(0, (model.key_heads, -1)) for weight in weights)
    per_key = model.value_heads // model.key_heads
    values = per_key * model.value_size
    parts = [*qkvz.split([model.key_size, model.key_size, values, values], dim=1), *ba.split(per_key, dim=1)]
    return torch.cat([part.flatten(0, 1) for part in parts])
