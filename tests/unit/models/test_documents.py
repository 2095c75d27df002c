# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Documents in one sequence see nothing of each other, through a stack of linear and softmax attention."""

from contextlib import contextmanager

import pytest
import torch

from megatron_async import platform
from tools.generation import generate

# Two kinds of attention without experts: those see other numbers of tokens when a document changes, and the sums of
# their matrix products are then taken in another order.
DENSE = (
    "--model smollm2-135m-mini --num-layers 4 --experimental-attention-variant gated_delta_net "
    "--linear-attention-freq 2 --linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 8 "
    "--linear-value-head-dim 8"
)
HYBRID = "--model moe-10b-hybrid-mini --num-layers 4"


@contextmanager
def built(words: str):
    platform.activate("cpu")
    from megatron_async.config import arguments
    from megatron_async.models import one_process

    run = "--device cpu --mock-data --tokenizer-type NullTokenizer --micro-batch-size 1 --train-iters 1 "
    args = arguments.parse(f"{run} {words} --vocab-size 61 --padded-vocab-size 64".split())
    with one_process.model(args, initialize=True) as model:
        yield model


@pytest.fixture(scope="module")
def model():
    with built(HYBRID) as hybrid:
        yield hybrid


def masks(length: int, start: int) -> dict[str, torch.Tensor]:
    causal = ~torch.ones(length, length, dtype=torch.bool).tril()
    reset = causal.clone()
    reset[start:, :start] = True
    return {"causal": causal[None, None], "reset": reset[None, None]}


def logits(model, tokens, mask):
    positions = torch.arange(tokens.shape[1]).unsqueeze(0)
    with torch.no_grad():
        return model(tokens, positions, mask)


@pytest.mark.parametrize(("words", "tolerance"), [(DENSE, 0.0), (HYBRID, 1e-5)])
def test_a_change_before_the_boundary_is_not_seen_behind_it(words, tolerance):
    """Tokens a b E | c d ...: with the reset, changing a leaves every output from c on as it was."""
    tokens = torch.randint(0, 60, (1, 80), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 0] = (changed[0, 0] + 1) % 60
    with built(words) as model:
        for start in (3, 64, 70):
            mask = masks(80, start)
            left, right = (logits(model, text, mask["reset"])[:, start:] for text in (tokens, changed))
            torch.testing.assert_close(left, right, rtol=0.0, atol=tolerance)
            difference = logits(model, tokens, mask["causal"]) - logits(model, changed, mask["causal"])
            assert difference[:, start:].abs().max() > 1e-4


def test_without_boundaries_the_mask_changes_nothing(model):
    tokens = torch.randint(0, 60, (1, 40), generator=torch.Generator().manual_seed(0))
    assert torch.equal(logits(model, tokens, masks(40, 5)["causal"]), logits(model, tokens, None))


def test_generation_is_greedy_and_repeatable(model):
    options = {"new_tokens": 6, "vocabulary": 61, "context": 16}
    greedy = generate(model, [1, 2, 3], **options)
    by_hand = [1, 2, 3]
    for _ in range(6):
        by_hand.append(int(logits(model, torch.tensor([by_hand]), None)[0, -1, :61].argmax()))
    assert greedy == by_hand[3:]
    assert generate(model, [1, 2, 3], **options, temperature=1.0, top_k=1) == greedy

    def sampled(seed: int) -> list[int]:
        return generate(model, [1], **options, temperature=5.0, generator=torch.Generator().manual_seed(seed))

    assert sampled(1) == sampled(1) != sampled(2)
    assert all(token < 61 for seed in range(5) for token in sampled(seed))
    assert generate(model, [1, 2, 3], **options, end=greedy[0]) == []
    assert len(generate(model, list(range(30)), **options)) == 6
    with pytest.raises(ValueError, match="the prompt gives no token"):
        generate(model, [], **options)
    with pytest.raises(ValueError, match="token id 61, but the model has 61 tokens"):
        generate(model, [3, 61], **options)


def test_idle_experts_get_zero_gradients(model):
    """Fewer tokens than experts: gradients of experts without a token are zero, not missing, and all are finite."""
    model.zero_grad()
    tokens = torch.tensor([[5, 9]])
    positions = torch.tensor([[0, 1]])
    model(tokens, positions, None, labels=tokens).sum().backward()
    experts = {name: param.grad for name, param in model.named_parameters() if ".local_experts." in name}
    assert all(grad is not None and bool(grad.isfinite().all()) for grad in experts.values())
    idle = [name for name, grad in experts.items() if not grad.any()]
    # Two tokens reach 2 of 32 experts each: at least 28 of 32 in each of 4 layers, with two weights each, are idle.
    assert len(idle) >= 4 * 28 * 2
    model.zero_grad()
