# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402 (the platform comes before everything of Megatron)
"""Rows that pad the vocabulary take no part in the loss; token ids outside it are refused."""

import math

import pytest
import torch

from megatron_async import platform

platform.activate("cpu")

from megatron_async.config import arguments
from megatron_async.models import one_process
from megatron_async.models.initialization import LayoutIndependentInit
from megatron_async.models.vocabulary import check_ids, mask_padding, true_rows

ARGUMENTS = (
    "--device cpu --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 "
    "--micro-batch-size 1 --train-iters 1 --mock-data --tokenizer-type NullTokenizer --normalization RMSNorm "
    "--untie-embeddings-and-output-weights"
).split()


@torch.no_grad()
def fill(model, vocabulary: int) -> None:
    """Random weights, the same whatever the padding."""
    for name, param in model.named_parameters():
        rows = vocabulary if name == "embedding.word_embeddings.weight" else len(param)
        generator = torch.Generator().manual_seed(len(name))
        param[:rows] = torch.randn(rows, *param.shape[1:], generator=generator)


def losses(vocabulary: int, padded: int, *, masked: bool):
    """Token losses of a model with equal logits and `padded` rows, and the gradient of its output table."""
    args = arguments.parse([*ARGUMENTS, "--vocab-size", str(vocabulary), "--padded-vocab-size", str(padded)])
    torch.manual_seed(0)
    tokens = torch.randint(0, vocabulary, (2, 8))
    with one_process.model(args, initialize=True) as model:
        fill(model, vocabulary)
        torch.nn.init.zeros_(model.output_layer.weight)
        if masked:
            mask_padding(vocabulary, [model])
        result = model(tokens, torch.arange(8).expand(2, 8), None, labels=tokens)
        result.mean().backward()
        return result.detach(), model.output_layer.weight.grad


def test_equal_logits_cost_the_logarithm_of_the_true_vocabulary():
    assert losses(5, 8, masked=True)[0].flatten().tolist() == pytest.approx([math.log(5)] * 16)
    assert losses(5, 8, masked=False)[0].flatten().tolist() == pytest.approx([math.log(8)] * 16)


@pytest.mark.parametrize(("vocabulary", "padded"), [(5, 8), (5, 16), (7, 8), (8, 8), (9, 128)])
def test_padding_changes_no_loss_and_gets_no_gradient(vocabulary, padded):
    found, gradient = losses(vocabulary, padded, masked=True)
    expected, right = losses(vocabulary, vocabulary, masked=False)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient[:vocabulary], right)
    assert not gradient[vocabulary:].any()


def test_initial_rows_do_not_depend_on_the_padding():
    tables = []
    for padded in (8, 24, 128):
        table = torch.nn.Module()
        table.output_layer = torch.nn.Linear(3, padded, bias=False)
        initial = LayoutIndependentInit(7, vocabulary=5)
        config = torch.nn.Module()
        config.init_method = config.output_layer_init_method = config.embedding_init_method = torch.nn.init.normal_
        initial.watch(config)
        config.init_method(table.output_layer.weight)
        initial.redraw([table])
        tables.append(table.output_layer.weight.detach())
    for table in tables:
        assert torch.equal(table[:5], tables[0][:5]) and table[:5].all() and not table[5:].any()


def test_only_tables_have_padded_rows():
    assert true_rows("output_layer.weight", (8, 4), 5) == 5
    assert true_rows("output_layer.weight", (8, 4), None) == 8
    assert true_rows("decoder.layers.0.mlp.linear_fc1.weight", (8, 4), 5) == 8


@pytest.mark.parametrize("key", ["tokens", "labels"])
@pytest.mark.parametrize("wrong", [7, 4096, -1])
def test_ids_outside_the_vocabulary_are_refused(key, wrong):
    batch = {"tokens": torch.tensor([[0, 6]]), "labels": torch.tensor([[6, 0]]), "loss_mask": torch.ones(1, 2) * 99}
    check_ids(batch, 7)
    batch[key] = torch.tensor([[3, wrong]])
    with pytest.raises(ValueError, match=rf"token id {wrong} \(in {key}\), but the tokenizer has 7 tokens, 0 to 6"):
        check_ids(batch, 7)
