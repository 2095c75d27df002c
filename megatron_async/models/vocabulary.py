# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Masks the rows that pad the vocabulary, and checks token ids.

Megatron pads the embedding table to a multiple that grows with the tensor-parallel size. Padded rows in the softmax
would give each layout another loss; here their logits are the lowest number, so loss, gradient and predictions depend
on the true vocabulary alone. Token ids outside it are an error: their embedding would be a padded row, and the loss of
such a label silently wrong.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import mpu

TABLES = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Parameters with one row for each token of the vocabulary and for padding."""


def mask_padding(vocabulary: int, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Let the output layer give padded tokens the lowest logit.

    Args:
        vocabulary: true size, without padding.
        chunks: unwrapped model chunks of this rank; they are returned.
    """
    for chunk in chunks:
        head = getattr(chunk, "output_layer", None)
        if head is None:
            continue
        width = head.output_size_per_partition
        first = mpu.get_tensor_model_parallel_rank() * width
        true_columns = min(max(vocabulary - first, 0), width)
        if true_columns < width:
            head.register_forward_hook(partial(_mask, true_columns))
    return chunks


@torch.no_grad()
def _mask(true_columns: int, head: torch.nn.Module, inputs: Any, outputs: tuple[torch.Tensor, Any]) -> None:
    """In place and hidden from autograd: the gradient of these logits is their probability, which is 0."""
    logits = outputs[0].detach()
    logits[..., true_columns:] = torch.finfo(logits.dtype).min


def check_ids(batch: Mapping[str, torch.Tensor], vocabulary: int) -> None:
    """Check the token ids of a micro-batch on the host.

    Raises:
        ValueError: an id is outside the vocabulary.
    """
    for key in ("tokens", "labels"):
        low, high = map(int, torch.aminmax(batch[key])) if key in batch else (0, 0)
        if low < 0 or high >= vocabulary:
            raise ValueError(
                f"the data hold token id {high if high >= vocabulary else low} (in {key}), but the tokenizer has "
                f"{vocabulary} tokens, 0 to {vocabulary - 1}. Prepare the data with the tokenizer of this run "
                "(--tokenizer-type, --tokenizer-model, --vocab-size), or give the one that they were made with."
            )


def true_rows(name: str, shape: Sequence[int], vocabulary: int | None) -> int:
    """Number of rows of a whole parameter without those that pad the vocabulary."""
    return min(vocabulary, shape[0]) if vocabulary is not None and name in TABLES else shape[0]
