# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""How the delay oracle splits the layers of a model."""

import numpy as np
import pytest
import torch
from torch import nn

from megatron_async.reference.delay import make, part_of
from megatron_async.schedules.arguments import oracle_problem


class Model(nn.Module):
    """One weight for each place that a parameter of a GPT can have; `layers` layers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.ModuleDict({"word_embeddings": nn.Linear(1, 1, bias=False)})
        self.decoder = nn.ModuleDict(
            {
                "layers": nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(layers)),
                "final_layernorm": nn.Linear(1, 1, bias=False),
            }
        )
        self.output_layer = nn.Linear(1, 1, bias=False)


def delays(model: Model) -> list[int]:
    """Delay of each layer."""
    return [layer.weight.gradient_delay for layer in model.decoder["layers"]]


@pytest.mark.parametrize(
    ("layers", "parts"),
    [(layers, parts) for layers in (1, 2, 7, 30, 31, 32) for parts in (1, 2, 3, 7, 16) if parts <= layers],
)
def test_the_first_parts_hold_the_remainder(layers, parts) -> None:
    expected = [part for part, piece in enumerate(np.array_split(range(layers), parts)) for _ in piece]
    assert [part_of(layer, layers, parts) for layer in range(layers)] == expected


@pytest.mark.parametrize(("layers", "parts"), [(2, 1), (12, 2), (12, 4), (30, 15), (32, 8)])
def test_even_parts_are_blocks_of_equal_size(layers, parts) -> None:
    assert [part_of(layer, layers, parts) for layer in range(layers)] == [
        layer * parts // layers for layer in range(layers)
    ]


@pytest.mark.parametrize("stages", [4, 8, 16])
def test_pipedream_with_thirty_layers(stages) -> None:
    """Figure 6 of arXiv 2606.30634: SmolLM2-135M on 4, 8 and 16 stages."""
    assert oracle_problem(f"pipedream:{stages}", 30) is None
    model = Model(30)
    oracle = make(f"pipedream:{stages}", model, 30)
    sizes = [30 // stages + (stage < 30 % stages) for stage in range(stages)]
    assert delays(model) == [stages - 1 - stage for stage, size in enumerate(sizes) for _ in range(size)]
    assert oracle.depth == stages - 1
    assert model.embedding["word_embeddings"].weight.gradient_delay == stages - 1
    assert model.decoder["final_layernorm"].weight.gradient_delay == model.output_layer.weight.gradient_delay == 0


def test_every_part_needs_a_layer() -> None:
    assert oracle_problem("pipedream:30", 30) is None
    assert "needs at least 31 layers; --num-layers is 30" in (oracle_problem("pipedream:31", 30) or "")
    assert "needs at least 2 layers" in (oracle_problem("wpipe", 1) or "")


def test_wpipe_with_an_odd_number_of_layers() -> None:
    model = Model(5)
    make("wpipe", model, 5)
    assert delays(model) == [1, 1, 1, 0, 0]


def test_gradients_are_taken_at_the_version_of_each_part() -> None:
    """Three layers on two stages: stage 0 holds two of them and uses weights one update old."""
    model = Model(3)
    oracle = make("pipedream:2", model, 3)
    weights = [layer.weight for layer in model.decoder["layers"]]
    for value in (1.0, 2.0, 3.0):
        with torch.no_grad():
            for weight in weights:
                weight.fill_(value)
        oracle.record()
    with oracle.stale():
        assert [weight.item() for weight in weights] == [2.0, 2.0, 3.0]
    assert [weight.item() for weight in weights] == [3.0, 3.0, 3.0]


def test_undelayed_head() -> None:
    model = Model(2)
    make("3", model, 2, undelayed_head=True)
    assert delays(model) == [3, 3]
    assert model.embedding["word_embeddings"].weight.gradient_delay == 3
    assert model.output_layer.weight.gradient_delay == 0
