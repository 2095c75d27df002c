# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Options of kernels: which function a layer calls. Kernels that need a GPU have stand-ins that compute in torch.

On CPUs the fused kernels are off, so each is switched on behind the checks of the command line.
"""

import argparse
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_async import platform

platform.activate("cpu")

from megatron.core.fusions import fused_bias_dropout, fused_softmax  # noqa: E402
from megatron.core.models.common.embeddings import rope_utils  # noqa: E402
from megatron.core.models.common.language_module import language_module  # noqa: E402
from megatron.core.transformer import mlp, transformer_config  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402

from megatron_async.config import arguments  # noqa: E402
from megatron_async.models import one_process  # noqa: E402

LINE = (
    "--device cpu --num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 0.01 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 60 --make-vocab-size-divisible-by 4 --bf16 --normalization RMSNorm --seed 5"
)
EXPERTS = "--num-experts 2 --moe-ffn-hidden-size 32 --moe-router-topk 1 --moe-router-pre-softmax --swiglu"
ATTENTION = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN", "NVTE_FLASH_ATTN_V2", "NVTE_FLASH_ATTN_V4")


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name in ATTENTION:  # set by every model that is built
        monkeypatch.setenv(name, "1")
        monkeypatch.delenv(name)


def built(words: str, run: Callable[[torch.nn.Module], Any], **switched: Any) -> Any:
    """What `run` makes of the model of these words, with arguments switched on."""
    args = arguments.parse([*LINE.split(), *words.split()])
    with one_process.model(
        argparse.Namespace(**vars(args) | switched | {"padded_vocab_size": 60}), initialize=True
    ) as model:
        return run(model)


@torch.no_grad()
def loss(model: torch.nn.Module) -> torch.Tensor:
    tokens = torch.arange(32)[None] % 60
    return model.bfloat16()(tokens, torch.arange(32)[None], None, labels=(tokens * 7) % 60)  # [1, sequence]


def unfused_rotation(t: torch.Tensor, freqs: torch.Tensor, **_: Any) -> torch.Tensor:
    return rope_utils._apply_rotary_pos_emb_bshd(t, freqs)


def unfused_routing(**given: Any) -> Any:
    return moe_utils.topk_routing_with_score_function(**given)


KERNELS = {
    "--no-bias-swiglu-fusion": (mlp, "bias_swiglu_impl", None, "--swiglu", {"bias_swiglu_fusion": True}),
    "--no-bias-gelu-fusion": (mlp, "bias_gelu_impl", None, "", {"bias_gelu_fusion": True}),
    "--no-bias-dropout-fusion": (
        fused_bias_dropout,
        "bias_dropout_add_fused_inference",
        None,
        "",
        {"bias_dropout_fusion": True},
    ),
    "--cross-entropy-loss-fusion": (
        language_module,
        "fused_vocab_parallel_cross_entropy",
        None,
        "",
        {"cross_entropy_loss_fusion": True},
    ),
    "--no-masked-softmax-fusion": (
        fused_softmax.FusedScaleMaskSoftmax,
        "forward_fused_softmax",
        fused_softmax.FusedScaleMaskSoftmax.forward_torch_softmax,
        "",
        {"masked_softmax_fusion": True},
    ),
    "--moe-router-fusion": (
        moe_utils,
        "fused_topk_with_score_function",
        unfused_routing,
        EXPERTS,
        {"moe_router_fusion": True},
    ),
    "--no-rope-fusion": (
        rope_utils,
        "fused_apply_rotary_pos_emb",
        unfused_rotation,
        "--position-embedding-type rope",
        {"apply_rope_fusion": True},
    ),
}
"""Option -> place and name of the kernel, what stands in for it, words of the model, arguments that switch it on."""


@pytest.mark.parametrize("option", KERNELS)
def test_the_kernel_runs_where_it_is_asked_for(monkeypatch, option):
    place, name, standin, words, switched = KERNELS[option]
    monkeypatch.setattr(moe_utils, "HAVE_TE", True)
    monkeypatch.setattr(transformer_config, "is_te_min_version", lambda *version: True)
    monkeypatch.setattr(fused_softmax.FusedScaleMaskSoftmax, "get_batch_per_block", lambda *shape: 1)  # asks the kernel
    kernel = mock.Mock(side_effect=standin or getattr(place, name))
    called = (lambda self, *given: kernel(self, *given)) if isinstance(place, type) else kernel
    monkeypatch.setattr(place, name, called)
    plain, without = built(words, loss), kernel.call_count
    fused = built(words, loss, **switched)
    assert (without, kernel.call_count > 0) == (0, True)
    torch.testing.assert_close(fused, plain, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("option", ["--moe-permute-fusion", "--moe-router-fusion", "--cross-entropy-loss-fusion"])
def test_what_needs_a_gpu_is_refused_on_cpus_and_left_out_of_a_model_in_one_process(monkeypatch, tmp_path, option):
    with pytest.raises(
        arguments.ArgumentProblems, match=rf"{option}: it needs a GPU \(on CPUs\). Leave it out, or run"
    ):
        arguments.parse([*LINE.split(), *EXPERTS.split(), option])
    saved = arguments.parse([*LINE.split(), *EXPERTS.split()])
    setattr(saved, option.lstrip("-").replace("-", "_"), True)
    monkeypatch.setattr(one_process.distributed, "arguments_of", lambda checkpoint: saved)
    args = one_process.arguments_of(tmp_path)
    args.padded_vocab_size = 60
    with one_process.model(args, initialize=True) as model:
        assert loss(model).isfinite().all()


@pytest.mark.parametrize(
    ("words", "expected"),
    [("--attention-backend flash", "100"), ("--attention-backend fused", "010"), ("--attention-backend auto", "111")],
)
def test_transformer_engine_is_told_its_attention(words, expected):
    """By variables that it reads: flash, fused, unfused."""
    assert built(words, lambda model: "".join(os.environ[name] for name in ATTENTION[:3])) == expected
    assert not any(name in os.environ for name in ATTENTION[3:])


def test_transformer_engine_is_told_its_version_of_flash_attention():
    built("--flash-attention-version 3", lambda model: None)
    assert [os.environ[name] for name in ATTENTION[3:]] == ["0", "0"] and "NVTE_FLASH_ATTN_V3" not in os.environ


def test_products_in_bf16_are_summed_in_fp32(monkeypatch):
    products = torch.backends.cuda.matmul
    before = products.allow_bf16_reduced_precision_reduction
    try:
        products.allow_bf16_reduced_precision_reduction = True
        built("", lambda model: None)
        assert products.allow_bf16_reduced_precision_reduction
        built("--disable-bf16-reduced-precision-matmul", lambda model: None)
        assert not products.allow_bf16_reduced_precision_reduction
    finally:
        products.allow_bf16_reduced_precision_reduction = before
