# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Multi-latent attention on CPUs: against transformers' DeepSeek-V3, its matrices for Muon, and what is refused."""

import argparse
import math
from collections.abc import Iterator

import pytest
import torch
from torch.testing import assert_close

from megatron_async import platform

platform.activate("cpu")

from transformers import DeepseekV3Config  # noqa: E402
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs  # noqa: E402

from megatron_async.config import arguments  # noqa: E402
from megatron_async.models import one_process  # noqa: E402
from megatron_async.optim.param_groups import layouts  # noqa: E402

HEADS, NOPE, ROTARY, VALUE, LATENT = 4, 8, 4, 12, 16
MODEL = f"""--device cpu --num-layers 1 --hidden-size 32 --num-attention-heads {HEADS} --ffn-hidden-size 64
    --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 0.01
    --mock-data --tokenizer-type NullTokenizer --vocab-size 60 --make-vocab-size-divisible-by 4 --normalization RMSNorm
    --disable-bias-linear --swiglu --multi-latent-attention --kv-lora-rank {LATENT} --qk-head-dim {NOPE}
    --qk-pos-emb-head-dim {ROTARY} --v-head-dim {VALUE} --norm-epsilon 1e-6 --seed 5""".split()
QUERIES = ["--q-lora-rank", "24", "--qk-layernorm"]
ROPE = ["--rope-type", "rope", "--position-embedding-type", "rope"]
NAMES = {
    "q_a_proj.weight": "linear_q_down_proj.weight",
    "q_a_layernorm.weight": "q_layernorm.weight",
    "q_b_proj.weight": "linear_q_up_proj.weight",
    "kv_a_proj_with_mqa.weight": "linear_kv_down_proj.weight",
    "kv_a_layernorm.weight": "kv_layernorm.weight",
    "kv_b_proj.weight": "linear_kv_up_proj.weight",
    "o_proj.weight": "linear_proj.weight",
}


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def parse(*more: str) -> argparse.Namespace:
    args = arguments.parse([*MODEL, *more])
    args.padded_vocab_size = 60
    return args


def attention(*more: str) -> Iterator[torch.nn.Module]:
    with one_process.model(parse(*more), initialize=True) as model:
        yield model.decoder.layers[0].self_attention


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}


@pytest.mark.parametrize(
    ("options", "rope"),
    [
        (ROPE, {"rope_type": "default"}),
        (["--rope-type", "yarn", "--rotary-scaling-factor", "4", "--mscale", "1", "--mscale-all-dim", "1"],
         YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}),
        (["--rope-type", "yarn", "--rotary-scaling-factor", "4", "--mscale", "0.7", "--mscale-all-dim", "0"],
         YARN | {"attention_factor": 0.1 * 0.7 * math.log(4) + 1, "mscale_all_dim": 0.0}),
    ],
    ids=["rope", "yarn", "yarn without a scale of the scores"],
)  # fmt: skip
def test_equals_that_of_transformers(options: list[str], rope: dict[str, object]) -> None:
    """Latents, norms, rotary parts and scale: output and gradient of the input."""
    config = DeepseekV3Config(
        hidden_size=32,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=24,
        kv_lora_rank=LATENT,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROTARY,
        v_head_dim=VALUE,
        max_position_embeddings=64,
        rope_parameters={"rope_theta": 10000.0, **rope},
        attn_implementation="eager",
    )
    torch.manual_seed(5)
    for ours in attention(*QUERIES, *options):
        for name, weight in ours.named_parameters():  # large enough for scores that are far from even
            torch.nn.init.normal_(weight, mean=float("layernorm" in name), std=0.3)
        right = theirs.DeepseekV3Attention(config, layer_idx=0)
        state = ours.state_dict()
        right.load_state_dict({name: state[own] for name, own in NAMES.items()})
        hidden = torch.randn(11, 2, 32)  # [sequence, micro-batch, hidden]
        inputs = [hidden.clone().requires_grad_(), hidden.clone().requires_grad_()]
        later = torch.ones(1, 1, 11, 11, dtype=torch.bool).triu(1)
        found = ours(inputs[0], attention_mask=later)[0]
        places = theirs.DeepseekV3RotaryEmbedding(config)(hidden, torch.arange(11)[None])
        mask = torch.zeros(1, 1, 11, 11).masked_fill(later, -torch.inf)
        expected = right(inputs[1].transpose(0, 1), places, mask)[0].transpose(0, 1)
    assert_close(found, expected, rtol=1e-4, atol=1e-5)
    weights = torch.randn(found.shape)
    (grad,), (good,) = (
        torch.autograd.grad((y * weights).sum(), x) for y, x in zip((found, expected), inputs, strict=True)
    )
    assert_close(grad, good, rtol=1e-4, atol=1e-4)


def test_keys_and_values_of_the_up_projection_are_matrices_of_their_own() -> None:
    with one_process.model(parse(*QUERIES, *ROPE), initialize=True) as model:
        found = layouts(
            model,
            model.config,
            lambda param: None,
            ("qkv", "matrix"),
            split_fused=True,
            split_gate_up=False,
            gather=True,
        )
        rows = {name.rpartition("self_attention.")[2]: layout.rows for name, _, layout in found if "attention" in name}
    assert rows == {
        "linear_q_down_proj.weight": (),
        "linear_q_up_proj.weight": (),
        "linear_kv_down_proj.weight": (),
        "linear_kv_up_proj.weight": (NOPE, VALUE),
        "linear_proj.weight": (),
    }


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tensor-model-parallel-size", "2"], "without --sequence-parallel"),
        (["--tensor-model-parallel-size", "2", "--sequence-parallel", "--q-lora-rank", "25"], "--q-lora-rank 25"),
        (["--tensor-model-parallel-size", "2", "--sequence-parallel", "--kv-lora-rank", "17"], "--kv-lora-rank 17"),
        (["--qk-layernorm"], "without --q-lora-rank"),
        (["--attention-output-gate"], "--attention-output-gate"),
        (["--group-query-attention", "--num-query-groups", "2"], "--group-query-attention"),
    ],
)
def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch, options: list[str], said: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(arguments.ArgumentProblems) as refusal:
        parse(*ROPE, *options)
    assert any(said in problem for problem in refusal.value.problems)
