# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Initial weights are drawn again, also those of layers that re-wrap their parameters, as Transformer Engine does."""

from types import SimpleNamespace

import pytest
import torch

from megatron_async.models.initialization import LayoutIndependentInit

SHAPE = (6, 4)


class PlainLayer(torch.nn.Module):
    """A norm and a linear layer whose weight the configuration's method initializes."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(SHAPE))
        self.weight = torch.nn.Parameter(torch.empty(SHAPE))
        self.reset_parameters(config)

    def reset_parameters(self, config: SimpleNamespace) -> None:
        config.init_method(self.weight)


class RewrappingLayer(PlainLayer):
    """Transformer Engine's loop: each parameter is initialized, then replaced by a new Parameter of its storage."""

    def reset_parameters(self, config: SimpleNamespace) -> None:
        methods = {"weight": config.init_method, "layer_norm_weight": torch.nn.init.ones_}
        for name, param in list(self.named_parameters()):
            methods[name](param)
            setattr(self, name, torch.nn.Parameter(param))


class CopyingLayer(PlainLayer):
    """Initializes a tensor that is not the model's."""

    def reset_parameters(self, config: SimpleNamespace) -> None:
        self.weight.data.copy_(config.init_method(torch.empty(SHAPE)))


class NormDrawingLayer(PlainLayer):
    def reset_parameters(self, config: SimpleNamespace) -> None:
        config.init_method(self.layer_norm_weight)


def built(layer: type[PlainLayer], number: int = 50) -> torch.nn.Module:
    normal = torch.nn.init.normal_
    config = SimpleNamespace(init_method=normal, output_layer_init_method=normal, embedding_init_method=None)
    initial = LayoutIndependentInit(7)
    initial.watch(config)
    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList(layer(config) for _ in range(number))
    (redrawn,) = initial.redraw([model])
    assert redrawn is model
    return model


def test_wrapped_parameters_get_the_weights_of_plain_ones():
    torch.manual_seed(1)
    plain = built(PlainLayer)
    torch.manual_seed(2)
    wrapped = built(RewrappingLayer)
    for (name, expected), (_, found) in zip(plain.named_parameters(), wrapped.named_parameters(), strict=True):
        assert torch.equal(found, expected), name
        assert torch.equal(found, torch.ones(SHAPE)) == name.endswith("norm_weight")
    weights = torch.stack([block.weight for block in wrapped.blocks])
    assert len(weights.flatten(1).unique(dim=0)) == 50, "every weight has a seed of its own"


def test_the_random_state_is_left_alone():
    torch.manual_seed(3)
    for _ in range(50):
        torch.empty(SHAPE).normal_()
    expected = torch.rand(1)
    torch.manual_seed(3)
    built(PlainLayer)
    assert torch.equal(torch.rand(1), expected)


def test_a_weight_that_is_not_the_models_is_an_error():
    with pytest.raises(AssertionError, match=r"the model does not hold: shapes \[\(6, 4\)"):
        built(CopyingLayer, 2)


def test_a_drawn_norm_is_an_error():
    with pytest.raises(AssertionError, match=r"blocks\.0\.layer_norm_weight is a norm"):
        built(NormDrawingLayer, 2)
