# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A byte-level BPE tokenizer trained on our own documents, and arguments for Megatron's builder of all others.

The saved folder is a Hugging Face tokenizer folder. Megatron loads it without a network through
`--tokenizer-type HuggingFaceTokenizer --tokenizer-model FOLDER`.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

END_OF_DOCUMENT = "<|endoftext|>"
# An id of its own, because Megatron masks the loss of padding tokens.
PADDING = "<|padding|>"
SPECIAL_TOKENS = (END_OF_DOCUMENT, PADDING)
SMALLEST_VOCABULARY = 256 + len(SPECIAL_TOKENS)
TOKENIZER_TYPE = "HuggingFaceTokenizer"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train byte-level BPE (arXiv:1508.07909, bytes as in GPT-2). The result depends on the input only.

    Every text decodes to itself, because all 256 bytes are in the vocabulary. Token 0 is `END_OF_DOCUMENT`, token 1
    `PADDING`. Few texts give fewer than `vocab_size` tokens: a pair must occur twice.

    Raises:
        ValueError: `vocab_size` has no room for the bytes and the special tokens.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(
            f"vocabulary size {vocab_size} is too small: 256 bytes and {len(SPECIAL_TOKENS)} special tokens need at "
            f"least {SMALLEST_VOCABULARY}."
        )
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` into `folder`, which is created."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_DOCUMENT,
        "pad_token": PADDING,
        "clean_up_tokenization_spaces": False,  # decoding must return the encoded bytes
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def tokenizer_namespace(**chosen: Any) -> argparse.Namespace:
    """Arguments for Megatron's tokenizer builder: its defaults, with `chosen` set."""
    from megatron_async.mcore.training import TokenizerConfig

    # The vocabulary is padded for the model that will train, which is not known here.
    return argparse.Namespace(**{**vars(TokenizerConfig()), "pad_vocab_size": False, "rank": 0, **chosen})
