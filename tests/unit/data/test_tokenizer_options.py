# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Options of tokenizers: what Megatron's tokenizers make of a text with them, from files that are made here."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import transformers
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from .conftest import MakeArguments

LETTERS = "abcdefgh"


@pytest.fixture
def pieces(tmp_path: Path) -> str:
    """A SentencePiece model of single letters."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(LETTERS)] * 9), model_writer=model, model_type="char", vocab_size=13
    )
    (tmp_path / "letters.model").write_bytes(model.getvalue())
    return str(tmp_path / "letters.model")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face tokenizer of single letters that begins each text with a token of its own."""
    own = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(LETTERS)}, merges=[]))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    own.add_special_tokens(["<s>", "</s>"])
    own.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 8)])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=own, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(tmp_path / "folder")
    return tmp_path / "folder"


def made(make: MakeArguments, kind: str, model: Any, *more: str) -> Any:
    return build_tokenizer(make("--tokenizer-type", kind, "--tokenizer-model", str(model), *more))


def test_spaces_of_sentencepiece(pieces: str, make_arguments: MakeArguments) -> None:
    """--no-tokenizer-sentencepiece-ignore-extra-whitespaces"""
    plain = made(make_arguments, "SentencePieceTokenizer", pieces)
    assert plain.tokenize("a   b") == plain.tokenize("a b")
    kept = made(
        make_arguments, "SentencePieceTokenizer", pieces, "--no-tokenizer-sentencepiece-ignore-extra-whitespaces"
    )
    assert len(kept.tokenize("a   b")) > len(kept.tokenize("a b"))


def test_special_tokens_of_sentencepiece(pieces: str, make_arguments: MakeArguments) -> None:
    """--tokenizer-special-tokens, which SentencePiece takes with --tokenizer-sentencepiece-legacy alone."""
    special = ("--tokenizer-special-tokens", "<x>")
    own = made(make_arguments, "SentencePieceTokenizer", pieces, "--tokenizer-sentencepiece-legacy", *special)
    plain = made(make_arguments, "SentencePieceTokenizer", pieces)
    assert own.vocab_size == plain.vocab_size + 1 and own.vocab_size - 1 in own.tokenize("a<x>b")
    with pytest.raises(ValueError, match="legacy"):
        made(make_arguments, "SentencePieceTokenizer", pieces, *special)


def test_metadata_names_the_class(pieces: str, tmp_path: Path, make_arguments: MakeArguments) -> None:
    """--tokenizer-metadata"""
    (tmp_path / "metadata.json").write_text(json.dumps({"library": "sentencepiece", "model_type": "mamba"}))
    words = ("--tokenizer-metadata", str(tmp_path / "metadata.json"))
    kinds = [type(made(make_arguments, "SentencePieceTokenizer", pieces, *more)).__name__ for more in ((), words)]
    assert kinds == ["DefaultTokenizerText", "MambaTokenizer"]


def test_tokens_that_hugging_face_adds(folder: Path, make_arguments: MakeArguments) -> None:
    """--tokenizer-hf-no-include-special-tokens, --tokenizer-special-tokens"""
    assert made(make_arguments, "HuggingFaceTokenizer", folder).tokenize("ab") == [8, 0, 1]
    bare = made(make_arguments, "HuggingFaceTokenizer", folder, "--tokenizer-hf-no-include-special-tokens")
    assert bare.tokenize("ab") == [0, 1]
    more = made(make_arguments, "HuggingFaceTokenizer", folder, "--tokenizer-special-tokens", "<x>")
    assert more.tokenize("a<x>")[-1] == 10


def test_code_beside_a_tokenizer_runs_on_request(
    tmp_path: Path, make_arguments: MakeArguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--trust-remote-code"""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "mine.py").write_text(
        "from transformers import PreTrainedTokenizer\n"
        "class Mine(PreTrainedTokenizer):\n"
        "    vocab_size = 256\n"
        "    def get_vocab(self): return {chr(n): n for n in range(256)}\n"
        "    def _tokenize(self, text): return list(text)\n"
        "    def _convert_token_to_id(self, token): return ord(token) + 1000\n"
    )
    settings = {"auto_map": {"AutoTokenizer": ["mine.Mine", None]}, "tokenizer_class": "Mine"}
    (tmp_path / "code" / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="trust_remote_code"):
        made(make_arguments, "HuggingFaceTokenizer", tmp_path / "code")
    own = made(make_arguments, "HuggingFaceTokenizer", tmp_path / "code", "--trust-remote-code")
    assert own.tokenize("ab") == [1097, 1098]


def test_vocabulary_and_merges_of_gpt2(tmp_path: Path, make_arguments: MakeArguments) -> None:
    """--vocab-file and --merge-file"""
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    vocabulary = {letter: number for number, letter in enumerate([*LETTERS, "ab", "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    files = ("--vocab-file", str(tmp_path / "vocab.json"), "--merge-file", str(tmp_path / "merges.txt"))
    assert made(make_arguments, "HuggingFaceTokenizer", tmp_path / "gpt2", *files).tokenize("abc") == [8, 2]
