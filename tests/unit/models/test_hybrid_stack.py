# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402 (the platform comes before everything of Megatron)
"""A GPT that is built as HybridModel has the names, checkpoints and logits of Megatron's GPTModel."""

import pytest
import torch

from megatron_async import platform

platform.activate("cpu")

from megatron_async.config import arguments
from megatron_async.mcore.checkpoint import sharded_state
from megatron_async.models import one_process
from megatron_async.models.naming import global_names

EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 16 --moe-grouped-gemm --disable-bias-linear"
MODELS = {
    "tied": "--device cpu",
    "LayerNorm, biases": "--untie-embeddings-and-output-weights",
    "experts": f"{EXPERTS} --normalization RMSNorm --qk-layernorm",
    "some experts": f"{EXPERTS} --moe-layer-freq [0,1,0,1] --normalization RMSNorm",
    "Gated DeltaNet": "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 "
    "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 8 "
    "--normalization RMSNorm --disable-bias-linear",
}
BASE = (
    "--device cpu --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --train-iters 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 60 "
    "--padded-vocab-size 64"
).split()


def built(words: str, name: str):
    """Names and shapes of parameters, what a checkpoint would hold, and logits of equal weights."""
    args = arguments.parse([*BASE, *words.split(), "--model-class", name])
    tokens = torch.arange(16)[None]
    with one_process.model(args, initialize=False) as model, torch.no_grad():
        params = dict(global_names(model))
        for number, key in enumerate(sorted(params)):
            params[key].copy_(torch.randn(params[key].shape, generator=torch.Generator().manual_seed(number)) / 8)
        saved = sorted(
            (item.key, item.global_shape, item.global_offset, getattr(item, "prepend_axis_num", None))
            for item in sharded_state(model, {"dp_cp_group": torch.distributed.group.WORLD}).values()
            if not hasattr(item, "build_fn")
        )
        names = {key: tuple(param.shape) for key, param in params.items()}
        return type(model).__name__, names, saved, model(tokens, tokens, None)


@pytest.mark.parametrize("words", MODELS.values(), ids=MODELS)
def test_names_checkpoints_and_logits(words):
    (of_gpt, *expected), (of_hybrid, *found) = (built(words, name) for name in ("gpt", "hybrid"))
    assert (of_gpt, of_hybrid) == ("GPTModel", "HybridModel")
    assert found[:-1] == expected[:-1]
    assert torch.equal(found[-1], expected[-1])
