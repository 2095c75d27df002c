# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The chunked gated delta rule against the recurrence, token by token."""

import itertools

import pytest
import torch
from torch.testing import assert_close

from megatron_async.models.delta_rule import (
    causal_convolution,
    document_starts,
    gated_delta_rule,
    l2_normalize,
)

KEY, VALUE, HEADS, BATCH = 8, 6, 3, 2


def recurrence(query, key, value, log_decay, beta, starts=None):
    """The definition in fp64: one token after the other."""
    query, key, value, log_decay, beta = (x.double() for x in (query, key, value, log_decay, beta))
    state = value.new_zeros(key.shape[0], HEADS, KEY, VALUE)
    outputs = []
    for t in range(key.shape[1]):
        if starts is not None:
            state = state * (~starts[:, t]).view(-1, 1, 1, 1)
        state = state * log_decay[:, t].exp()[..., None, None]
        error = value[:, t] - torch.einsum("bhkv,bhk->bhv", state, key[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, t] * beta[:, t, :, None], error)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]) * KEY**-0.5)
    return torch.stack(outputs, 1).float(), state.float()


def inputs(length, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    query, key = (l2_normalize(torch.randn(BATCH, length, HEADS, KEY)) for _ in range(2))
    value = torch.randn(BATCH, length, HEADS, VALUE)
    log_decay = -torch.rand(BATCH, length, HEADS)
    beta = torch.rand(BATCH, length, HEADS)
    return [x.to(dtype).requires_grad_() for x in (query, key, value, log_decay, beta)]


def gradients(function, tensors, *args):
    outputs, state = function(*tensors, *args)
    torch.manual_seed(1)
    weights = torch.randn(outputs.shape)
    loss = (outputs.float() * weights).sum() + state.sum()
    return outputs, state, torch.autograd.grad(loss, tensors)


@pytest.mark.parametrize("length", [1, 7, 63, 64, 65, 200])
def test_equals_the_recurrence(length):
    tensors = inputs(length)
    outputs, state, grads = gradients(gated_delta_rule, tensors)
    expected, expected_state, expected_grads = gradients(recurrence, tensors)
    assert_close(outputs, expected, rtol=1e-4, atol=1e-4)
    assert_close(state, expected_state, rtol=1e-4, atol=1e-4)
    for grad, reference in zip(grads, expected_grads, strict=True):
        assert_close(grad, reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [7, 200])
def test_bf16_inputs_are_computed_in_fp32(length):
    tensors = inputs(length, dtype=torch.bfloat16)
    outputs, _, grads = gradients(gated_delta_rule, tensors)
    expected, _, expected_grads = gradients(recurrence, tensors)
    assert outputs.dtype == torch.bfloat16
    assert_close(outputs.float(), expected, rtol=2e-2, atol=2e-2)
    for grad, reference in zip(grads, expected_grads, strict=True):
        assert_close(grad, reference, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("chunk", [1, 16, 64])
def test_resets_equal_separate_documents(chunk):
    tensors = inputs(150, seed=3)
    starts = torch.zeros(BATCH, 150, dtype=torch.bool)
    # Inside a chunk, two in a row, at a chunk's first and last token; another pattern in the second sample.
    starts[0, [5, 6, 64, 127]] = True
    starts[1, [0, 100]] = True
    outputs, state, grads = gradients(gated_delta_rule, tensors, starts, chunk)
    expected, expected_state, expected_grads = gradients(recurrence, tensors, starts)
    assert_close(outputs, expected, rtol=1e-4, atol=1e-4)
    assert_close(state, expected_state, rtol=1e-4, atol=1e-4)
    for grad, reference in zip(grads, expected_grads, strict=True):
        assert_close(grad, reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("decay", [-50.0, -1e4])
def test_strong_decay_is_no_memory(decay):
    query, key, value, log_decay, beta = inputs(130)
    log_decay = torch.full_like(log_decay, decay).requires_grad_()
    outputs, state, grads = gradients(gated_delta_rule, [query, key, value, log_decay, beta])
    alone = (query * key).sum(-1, keepdim=True) * beta.unsqueeze(-1) * value * KEY**-0.5
    assert_close(outputs, alone, rtol=1e-4, atol=1e-5)
    assert all(bool(grad.isfinite().all()) for grad in (*grads, state))


def test_one_strong_decay_does_not_blur_its_neighbors():
    """Sums of decays grow large; their differences must stay exact."""
    query, key, value, log_decay, beta = (x.detach() for x in inputs(64))
    log_decay = log_decay.clone()
    log_decay[:, 10] = -1e4
    outputs, _ = gated_delta_rule(query, key, value, log_decay, beta)
    assert_close(outputs, recurrence(query, key, value, log_decay, beta)[0], rtol=1e-5, atol=1e-5)


def test_gate_one_is_the_ungated_rule():
    query, key, value, log_decay, beta = (x.detach() for x in inputs(100))
    outputs, _ = gated_delta_rule(query, key, value, torch.zeros_like(log_decay), beta)
    state = torch.zeros(BATCH, HEADS, KEY, VALUE)
    for t in range(100):  # without any decay in the formula
        error = value[:, t] - torch.einsum("bhkv,bhk->bhv", state, key[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, t] * beta[:, t, :, None], error)
        expected = torch.einsum("bhkv,bhk->bhv", state, query[:, t]) * KEY**-0.5
        assert_close(outputs[:, t], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [64, 200])
@pytest.mark.parametrize("kind", ["equal", "opposite", "tiny"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_of_norm_one_are_always_finite(length, kind, dtype):
    """The hardest systems: every key along one line, written at full strength, nothing forgotten."""
    query, key, value, log_decay, beta = (x.detach() for x in inputs(length, dtype=dtype))
    one = key[:, :1].expand_as(key).clone()
    if kind == "opposite":
        one[:, ::2] *= -1
    if kind == "tiny":  # the norm's epsilon is all there is
        one = l2_normalize(one * 1e-8)
    tensors = [query, one, value, torch.zeros_like(log_decay), torch.ones_like(beta)]
    tensors = [x.requires_grad_() for x in tensors]
    outputs, state, grads = gradients(gated_delta_rule, tensors)
    expected, expected_state, _ = gradients(recurrence, tensors)
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    assert_close(outputs.float(), expected, **close)
    assert_close(state, expected_state, **close)
    assert all(bool(grad.isfinite().all()) for grad in grads)


def test_beta_zero_gives_zero():
    query, key, value, log_decay, beta = inputs(70)
    outputs, state = gated_delta_rule(query, key, value, log_decay, torch.zeros_like(beta))
    assert not outputs.any() and not state.any()


def test_convolution_with_resets_equals_separate_documents():
    torch.manual_seed(0)
    x, weight = torch.randn(2, 20, 5), torch.randn(5, 4)
    starts = torch.zeros(2, 20, dtype=torch.bool)
    starts[0, [1, 7, 9]] = True
    result = causal_convolution(x, weight, starts)
    for sample, bounds in ((0, [0, 1, 7, 9, 20]), (1, [0, 20])):
        for first, end in itertools.pairwise(bounds):
            alone = causal_convolution(x[sample : sample + 1, first:end], weight)
            assert_close(result[sample : sample + 1, first:end], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("length", [1, 2, 3, 50])
def test_convolution_is_causal(length):
    torch.manual_seed(0)
    x, weight = torch.randn(1, length, 3), torch.randn(3, 4)
    result = causal_convolution(x, weight)
    padded = torch.cat([torch.zeros(1, 3, 3), x], 1)
    expected = sum(padded[:, shift : shift + length] * weight[:, shift] for shift in range(4))
    assert_close(result, expected, rtol=1e-5, atol=1e-6)
    no_start = torch.zeros(1, length, dtype=torch.bool)
    assert_close(causal_convolution(x, weight, no_start), expected, rtol=1e-5, atol=1e-6)


def test_document_starts_of_megatrons_mask():
    causal = ~torch.ones(6, 6, dtype=torch.bool).tril()
    assert document_starts(None) is None
    assert document_starts(causal[None, None]) is None
    two = causal.clone()
    two[3:, :3] = True  # a b E | c d e
    starts = document_starts(torch.stack([two, causal]).unsqueeze(1))
    assert starts is not None
    assert starts.tolist() == [[False, False, False, True, False, False], [False] * 6]
