# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""How one of Megatron's weights, as a single process holds it, becomes one or more of Hugging Face's.

Rows are cut and reordered. No number changes, so a round trip is bit-equal.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

ROUTER_BIAS = "e_score_correction_bias"
"""Hugging Face's name of the bias by which a router chooses experts; it is float32 in every folder."""

Tensors = tuple[torch.Tensor, ...]
Cut = Callable[..., Tensors]
"""(Megatron's weight [rows, ...], settings=those of the model) -> its counterparts."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How a weight of Megatron's becomes weights of Hugging Face's.

    Attributes:
        names: Hugging Face's.
        split: Megatron's weight [rows, ...] -> its counterparts.
    """

    names: tuple[str, ...]
    split: Callable[[torch.Tensor], Tensors]

    def join(self, weights: Tensors) -> torch.Tensor:
        """The inverse of `split`."""
        rows = torch.cat(weights)
        order = torch.cat(self.split(torch.arange(len(rows)).unsqueeze(1))).flatten()
        return rows[order.argsort()]


def whole(weight: torch.Tensor, settings: Mapping[str, Any]) -> Tensors:
    """A weight that is the same on both sides."""
    return (weight,)


def gate_and_up(weight: torch.Tensor, settings: Mapping[str, Any]) -> Tensors:
    """The first layer of a gated feed-forward block."""
    return weight.chunk(2)


def attention(weight: torch.Tensor, settings: Mapping[str, Any], *, gated: bool = False) -> Tensors:
    """Megatron's rows, for each group: its query heads, their gates if there are any, the key, the value.

    Hugging Face's query rows are by head, each followed by its gate.
    """
    groups = settings["num_key_value_heads"]
    per_group = settings["num_attention_heads"] // groups
    gates = per_group if gated else 0
    heads = weight.unflatten(0, (groups, per_group + gates + 2, settings["head_dim"]))
    query, gate, key, value = heads.split([per_group, gates, 1, 1], dim=1)
    if gated:
        query = torch.stack([query, gate], dim=2)
    return tuple(part.reshape(-1, weight.shape[1]) for part in (query, key, value))


def gated_feed_forward(megatron: str, there: str) -> dict[str, str]:
    """Names of the weights of a feed-forward block."""
    return {
        f"{megatron}.linear_fc1.weight": f"{there}.gate_proj.weight {there}.up_proj.weight",
        f"{megatron}.linear_fc2.weight": f"{there}.down_proj.weight",
    }


def of_layers(table: Mapping[str, str]) -> dict[str, str]:
    """Names in a layer -> names in the model."""
    return {
        f"decoder.layers.{{layer}}.{name}": re.sub(r"(^| )", r"\1model.layers.{layer}.", there)
        for name, there in table.items()
    }
