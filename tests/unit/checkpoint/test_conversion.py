# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Names, tensors, objects and arguments of a GPT's checkpoint and of the HybridModel with the same layers."""

from argparse import Namespace

import pytest
import torch

from megatron_async.checkpoint import conversion
from megatron_async.mcore.checkpoint import Contents, Place
from megatron_async.models.hybrid import BEYOND_HYBRID

ALIKE = Namespace(
    hybrid_layer_pattern=None,
    num_layers=2,
    num_experts=4,
    moe_layer_freq=1,
    experimental_attention_variant=None,
    linear_attention_freq=None,
    **dict.fromkeys((*BEYOND_HYBRID, "multi_latent_attention"), False),
)
FIRST, SECOND = torch.arange(6.0).view(2, 3), torch.arange(16.0).view(2, 4, 2)
LAYERS = "optimizer.state.exp_avg.decoder.layers."


def test_alike_layers_are_cut_and_stacked():
    gpt = Contents(
        {
            f"{LAYERS}self_attention.linear_qkv.weight": FIRST,
            "older.1.decoder.layers.mlp.experts.experts.linear_fc1.weight": SECOND,
            "decoder.final_layernorm.weight": torch.ones(3),
            "embedding.word_embeddings.weight": torch.zeros(3),
        },
        {
            Place("decoder.layers.mlp.experts.experts.linear_fc1._extra_state", (2, 4), (1, 3)): "expert",
            Place("decoder.layers.mlp.router._extra_state", (2,), (1,)): "router",
            Place(f"{LAYERS}mlp.router.weight.1_0_0_of_2_2_1", (1,), (0,)): "rows",
            Place("rng_state", (1, 1), (0, 0)): "rng",
        },
        {"iteration": 3},
    )
    hybrid = conversion._to_hybrid(gpt)
    assert {name: value.tolist() for name, value in hybrid.tensors.items()} == {
        f"{LAYERS}0.self_attention.linear_qkv.weight": FIRST[0].tolist(),
        f"{LAYERS}2.self_attention.linear_qkv.weight": FIRST[1].tolist(),
        "older.1.decoder.layers.1.mlp.experts.experts.linear_fc1.weight": SECOND[0].tolist(),
        "older.1.decoder.layers.3.mlp.experts.experts.linear_fc1.weight": SECOND[1].tolist(),
        "decoder.final_norm.weight": [1.0] * 3,
        "embedding.word_embeddings.weight": [0.0] * 3,
    }
    assert hybrid.objects == {
        Place("decoder.layers.3.mlp.experts.experts.linear_fc1._extra_state", (4,), (3,)): "expert",
        Place("decoder.layers.3.mlp.router._extra_state", (1,), (0,)): "router",
        Place(f"{LAYERS}3.mlp.router.weight.0_0_of_2_1", (1,), (0,)): "rows",
        Place("rng_state", (1, 1), (0, 0)): "rng",
        Place("output_layer._extra_state", (1,), (0,)): None,
    }
    again = conversion._to_gpt(hybrid, ALIKE)
    assert again.objects == gpt.objects and again.common == gpt.common
    assert again.tensors.keys() == gpt.tensors.keys()
    assert all(torch.equal(again.tensors[name], value) for name, value in gpt.tensors.items())


def test_other_layers_keep_tensors_of_their_own():
    name = "decoder.layers.{}.mlp.linear_fc1.weight"
    gpt = Contents(
        {name.format(0): FIRST, name.format(1): SECOND},
        {Place("optimizer.state.v.decoder.layers.1.mlp.linear_fc2.weight.0_1_of_1_2", (1,), (0,)): "columns"},
        {},
    )
    hybrid = conversion._to_hybrid(gpt)
    assert hybrid.tensors.keys() == {name.format(1), name.format(3)}
    some = Namespace(**vars(ALIKE) | {"moe_layer_freq": [0, 1]})
    assert conversion._to_gpt(hybrid, some) == gpt


@pytest.mark.parametrize(
    ("pattern", "changes"),
    [
        ("*-|*-", {"num_layers": 2, "moe_layer_freq": 1, "experimental_attention_variant": None}),
        ("*E*E", {"num_layers": 2, "moe_layer_freq": 1, "linear_attention_freq": None}),
        ("*-*E", {"moe_layer_freq": [0, 1]}),
        ("GEGE*EGEGE*E", {"linear_attention_freq": 3, "experimental_attention_variant": "gated_delta_net"}),
        ("*EGE", {"linear_attention_freq": [0, 1]}),
        ("+-+E", {"moe_layer_freq": [0, 1], "linear_attention_freq": None}),
    ],
)
def test_arguments_come_back(pattern, changes):
    letters = pattern.replace("|", "")
    args = Namespace(**vars(ALIKE) | {"hybrid_layer_pattern": pattern, "num_layers": len(letters)})
    found = conversion.gpt_arguments(args)
    assert found["hybrid_layer_pattern"] is None and changes.items() <= found.items()
    gpt = Namespace(**vars(args) | found)
    gpt.num_experts = 4 if "E" in pattern else None
    gpt.multi_latent_attention = "+" in pattern
    again = conversion.hybrid_arguments(gpt)
    assert (again["hybrid_layer_pattern"], again["num_layers"]) == (letters, len(letters))


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("M-*-", "'M' at position 0"),
        ("*-M-", "'M' at position 2"),
        ("**--", r"'\*' at position 1"),
        ("*-*", "it ends at position 3"),
    ],
)
def test_patterns_without_a_gpt_are_refused_with_the_position(pattern, message):
    with pytest.raises(ValueError, match=message):
        conversion.gpt_arguments(Namespace(hybrid_layer_pattern=pattern))
