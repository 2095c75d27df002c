# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Text from a trained model: one full forward for each token, the same computation as in training."""

from typing import Any

import torch


@torch.no_grad()
def generate(
    model: Any,
    prompt: list[int],
    *,
    new_tokens: int,
    vocabulary: int,
    context: int,
    temperature: float = 0.0,
    top_k: int = 0,
    end: int | None = None,
    generator: torch.Generator | None = None,
) -> list[int]:
    """Continue a prompt.

    Args:
        model: a whole Megatron GPT, in evaluation mode.
        prompt: token ids, at least one.
        new_tokens: most tokens to add.
        vocabulary: true size; ids that pad the table are never chosen.
        context: longest sequence of the model; of a longer text the last tokens are read.
        temperature: 0 takes the likeliest token; larger values are more random.
        top_k: sample from the K likeliest tokens; 0 for all.
        end: id that ends the text; it is not returned.
        generator: for sampling.

    Returns:
        The new tokens.

    Raises:
        ValueError: the prompt has no token, or one outside the vocabulary.
    """
    if not prompt:
        raise ValueError("the prompt gives no token: give a longer one.")
    if max(prompt) >= vocabulary:
        raise ValueError(
            f"the prompt has token id {max(prompt)}, but the model has {vocabulary} tokens: give the tokenizer "
            "that it was trained with."
        )
    tokens = list(prompt)
    while len(tokens) < len(prompt) + new_tokens:
        read = torch.tensor([tokens[-context:]], device=next(model.parameters()).device)
        positions = torch.arange(read.shape[1], device=read.device).unsqueeze(0)
        scores = model(read, positions, None)[0, -1, :vocabulary].float()
        choice = _choose(scores, temperature, top_k, generator)
        if choice == end:
            break
        tokens.append(choice)
    return tokens[len(prompt) :]


def _choose(scores: torch.Tensor, temperature: float, top_k: int, generator: torch.Generator | None) -> int:
    if temperature == 0:
        return int(scores.argmax())
    if 0 < top_k < len(scores):
        scores = scores.masked_fill(scores < scores.topk(top_k).values[-1], float("-inf"))
    chances = torch.softmax(scores / temperature, dim=-1)
    return int(torch.multinomial(chances, 1, generator=generator))
