# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""One document a sequence, padded, in place of packed documents (arXiv 2606.30634, E)."""

from typing import Any

import numpy as np
from megatron.core.datasets.gpt_dataset import GPTDataset


class DocumentDataset(GPTDataset):
    """Megatron's data set with sequences that never hold two documents.

    A sequence begins at a document's start. A longer document continues in further sequences; the rest of the last is
    padding, whose loss is masked. Every epoch has each sequence once, in an order of its own that depends on the seed.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        # Megatron masks the padding of the first sample in the very mask that it keeps for all others.
        self.masks_and_position_ids_are_cacheable = False

    def _build_document_sample_shuffle_indices(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Document and first token of each sequence of an epoch, and the order of all epochs' sequences."""
        size, extra = self.config.sequence_length, self.config.add_extra_token_to_sequence
        lengths = self.dataset.sequence_lengths[self.indices].astype(np.int64)
        parts = -(-np.maximum(lengths - extra, 0) // size)  # the last token is a label only
        documents = np.repeat(self.indices, parts)
        if not len(documents):
            raise ValueError(f"{self.dataset_path}: no document has two tokens, so there is nothing to predict.")
        starts = size * (np.arange(len(documents)) - np.repeat(np.cumsum(parts) - parts, parts))
        generator = np.random.RandomState(self.config.random_seed)
        epochs = -(-(self.num_samples or len(documents)) // len(documents))
        order = np.concatenate([generator.permutation(len(documents)) for _ in range(epochs)])
        return documents, starts, order

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def _query_document_sample_shuffle_indices(self, idx: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Tokens of a sequence (sequence length + 1,), padded; its document; the number of tokens before padding."""
        part = self.shuffle_index[idx]
        document, start = int(self.document_index[part]), int(self.sample_index[part])
        size = self.config.sequence_length + self.config.add_extra_token_to_sequence
        length = min(size, int(self.dataset.sequence_lengths[document]) - start)
        text = np.full(size, self._pad_token_id, dtype=np.int64)
        text[:length] = self.dataset.get(document, offset=start, length=length)
        return text, np.array([document]), [length]
