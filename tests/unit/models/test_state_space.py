# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The chunked state-space scan against the recurrence, and Mamba layers against transformers' Mamba-2."""

import pytest
import torch
from torch.testing import assert_close

from megatron_async.models.state_space import state_space_scan

BATCH, HEADS, GROUPS, SIZE, STATE = 2, 4, 2, 6, 5


def recurrence(x, steps, decay, inputs, outputs, skip):
    """The definition in fp64: one token after the other."""
    x, steps, decay, inputs, outputs = (values.double() for values in (x, steps, decay, inputs, outputs))
    b, c = (values.repeat_interleave(HEADS // GROUPS, dim=2) for values in (inputs, outputs))
    state = x.new_zeros(BATCH, HEADS, STATE, SIZE)
    parts = []
    for t in range(x.shape[1]):
        step = steps[:, t, :, None, None]
        written = torch.einsum("bhn,bhp->bhnp", b[:, t], x[:, t])
        state = state * (step * decay[:, None, None]).exp() + step * written
        parts.append(torch.einsum("bhn,bhnp->bhp", c[:, t], state))
    return (torch.stack(parts, 1) + skip.double()[:, None] * x).float()


@pytest.mark.parametrize("length", [1, 7, 8, 9, 40])
def test_equals_the_recurrence(length):
    torch.manual_seed(length)
    tensors = [
        torch.randn(BATCH, length, HEADS, SIZE),
        torch.rand(BATCH, length, HEADS) + 0.01,
        -torch.rand(HEADS) * 4,
        torch.randn(BATCH, length, GROUPS, STATE),
        torch.randn(BATCH, length, GROUPS, STATE),
        torch.randn(HEADS),
    ]
    tensors = [values.requires_grad_() for values in tensors]
    weights = torch.randn(BATCH, length, HEADS, SIZE)
    found, expected = state_space_scan(*tensors, chunk=8), recurrence(*tensors)
    assert_close(found, expected, rtol=1e-4, atol=1e-5)
    grads = [torch.autograd.grad((y * weights).sum(), tensors) for y in (found, expected)]
    for grad, right in zip(*grads, strict=True):
        assert_close(grad, right, rtol=1e-4, atol=1e-4)


def test_a_mixer_equals_that_of_transformers(monkeypatch):
    """Weights, convolution, scan and gated norm with two groups, outputs and gradient of the input."""
    from megatron_async import platform

    platform.activate("cpu")
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    from megatron_async.config import arguments
    from megatron_async.models import one_process

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    args = arguments.parse(
        "--device cpu --hybrid-layer-pattern M --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
        "--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 0.01 --mock-data "
        "--tokenizer-type NullTokenizer --vocab-size 60 --make-vocab-size-divisible-by 4 --normalization RMSNorm "
        "--disable-bias-linear --mamba-head-dim 16 --mamba-state-dim 8 --mamba-num-groups 2 --seed 5".split()
    )
    sizes = {"num_heads": 4, "head_dim": 16, "hidden_size": 32, "state_size": 8, "n_groups": 2, "expand": 2}
    theirs = Mamba2Mixer(Mamba2Config(**sizes, conv_kernel=4, chunk_size=4, num_hidden_layers=1), layer_idx=0)
    args.padded_vocab_size = 60
    with one_process.model(args, initialize=True) as model:
        ours = model.decoder.layers[0].mixer
        torch.nn.init.normal_(ours.D)
        torch.nn.init.normal_(ours.norm.weight, mean=1, std=0.1)
        names = {"conv1d_weight": "conv1d.weight", "conv1d_bias": "conv1d.bias"}
        theirs.load_state_dict(
            {names.get(name, name): value for name, value in ours.state_dict().items() if "_extra_state" not in name}
        )
        hidden = torch.randn(11, 3, 32)  # [sequence, batch, hidden]
        inputs = [hidden.clone().requires_grad_(), hidden.clone().requires_grad_()]
        found, expected = ours(inputs[0])[0], theirs(inputs[1].transpose(0, 1)).transpose(0, 1)
    assert_close(found, expected, rtol=1e-4, atol=1e-5)
    weights = torch.randn(found.shape)
    (grad,), (right,) = (
        torch.autograd.grad((y * weights).sum(), x) for y, x in zip((found, expected), inputs, strict=True)
    )
    assert_close(grad, right, rtol=1e-4, atol=1e-5)
