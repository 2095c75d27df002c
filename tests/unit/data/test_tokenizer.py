# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

from megatron_async.data.preprocessing.prepare import CorpusPaths
from megatron_async.data.preprocessing.stdlib_corpus import read_corpus
from megatron_async.data.preprocessing.tokenizer import (
    SMALLEST_VOCABULARY,
    TOKENIZER_TYPE,
    save_tokenizer,
    tokenizer_namespace,
    train_tokenizer,
)


@pytest.fixture(scope="module")
def megatron_tokenizer(corpus: CorpusPaths) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        return build_tokenizer(
            tokenizer_namespace(tokenizer_type=TOKENIZER_TYPE, tokenizer_model=str(corpus.tokenizer))
        )


def test_megatron_loads_the_folder(megatron_tokenizer: Any, corpus: CorpusPaths) -> None:
    assert megatron_tokenizer.vocab_size == corpus.vocab_size == 300
    assert megatron_tokenizer.eod == 0
    # An id of its own: Megatron masks the loss of padding.
    assert megatron_tokenizer.pad == 1
    assert megatron_tokenizer.tokenize("<|endoftext|>") == [0]


@settings(deadline=None, max_examples=60)
@given(text=st.text())
def test_any_text_round_trips(megatron_tokenizer: Any, text: str) -> None:
    ids = megatron_tokenizer.tokenize(text)
    assert all(0 <= token < megatron_tokenizer.vocab_size for token in ids)
    assert megatron_tokenizer.detokenize(ids) == text


def test_documents_round_trip(megatron_tokenizer: Any, source_root: Path) -> None:
    _, valid = read_corpus(source_root)
    for text in valid.values():
        assert megatron_tokenizer.detokenize(megatron_tokenizer.tokenize(text)) == text


def test_training_is_deterministic(tmp_path: Path, source_root: Path) -> None:
    texts = list(read_corpus(source_root)[0].values())
    for name in ("first", "second"):
        save_tokenizer(train_tokenizer(texts, 400), tmp_path / name)
    files = ("tokenizer.json", "tokenizer_config.json")
    assert all((tmp_path / "first" / f).read_bytes() == (tmp_path / "second" / f).read_bytes() for f in files)
    assert json.loads((tmp_path / "first" / "tokenizer_config.json").read_text())["eos_token"] == "<|endoftext|>"


def test_merges_are_learned_up_to_the_size() -> None:
    tokenizer = train_tokenizer(["the cat and the hat and the bat"] * 3, SMALLEST_VOCABULARY + 5)
    assert tokenizer.get_vocab_size() == SMALLEST_VOCABULARY + 5
    assert len(tokenizer.encode(" the").ids) < 4


def test_vocabulary_without_room_for_bytes() -> None:
    with pytest.raises(ValueError, match=r"vocabulary size 257 is too small.*at least 258"):
        train_tokenizer(["text"], 257)
