# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A Hugging Face checkpoint folder: config.json, safetensors shards with their index, tokenizer files."""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer

from megatron_async import files
from megatron_async.models.huggingface.architecture import ConversionProblems

_ONE, _INDEX, _UNFINISHED = "model.safetensors", "model.safetensors.index.json", ".shard-{}.new"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_TOKENIZER_FILES = (
    "tokenizer.json",
    _TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
# Weights of published checkpoints that pretraining does not use: position tables of old Llama exports, and Qwen3-Next's
# layer for multi-token prediction.
_IGNORED = ("rotary_emb.inv_freq", "mtp.")
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json.

    Raises:
        ConversionProblems: missing, or not JSON.
    """
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConversionProblems([f"{path}: cannot be read ({error})."]) from error
    return config


class Weights:
    """Reads single tensors from a folder's shards.

    A tied model may store its head a second time, if the copy equals the embedding.

    Args:
        folder: the checkpoint.
        expected: shape of every tensor that is needed.

    Raises:
        ConversionProblems: shards or tensors are missing, have another shape, or are unknown; each is named.
    """

    def __init__(self, folder: Path, expected: Mapping[str, tuple[int, ...]]) -> None:
        names = _shards(folder)
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ConversionProblems([f"{folder / name}: this shard is missing." for name in missing])
        self._shard_of: dict[str, Any] = {}
        problems = []
        found: dict[str, tuple[int, ...]] = {}
        for name in names:
            try:
                shard = safe_open(folder / name, framework="pt")
            except (SafetensorError, OSError) as error:
                problems.append(f"{folder / name}: not a whole safetensors file ({error}).")
                continue
            for tensor in shard.keys():  # noqa: SIM118 (not a mapping)
                found[tensor] = tuple(shard.get_slice(tensor).get_shape())
                self._shard_of[tensor] = shard
        if _HEAD in found and _HEAD not in expected and found.get(_EMBEDDING) == expected.get(_EMBEDDING):
            del found[_HEAD]
            if not torch.equal(self[_HEAD], self[_EMBEDDING]):
                problems.append(f"tensor {_HEAD}: config.json ties it to {_EMBEDDING}, but their values differ.")
        problems += list(_differences(found, expected))
        if problems:
            raise ConversionProblems(problems)

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._shard_of[name].get_tensor(name)
        return tensor


def _shards(folder: Path) -> list[str]:
    """Names of the files that the index lists, or of the only one."""
    index = folder / _INDEX
    if not index.is_file():
        return [_ONE]
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConversionProblems([f"{index}: not an index of shards ({type(error).__name__}: {error})."]) from error


def _differences(found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    for name, shape in expected.items():
        if name not in found:
            yield f"tensor {name}: missing; expected {list(shape)}."
        elif found[name] != shape:
            yield f"tensor {name}: expected {list(shape)}, found {list(found[name])}."
    for name in found.keys() - expected.keys():
        if not any(mark in name for mark in _IGNORED):
            yield f"tensor {name} {list(found[name])}: unknown in this architecture."


def write(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    tokenizer: Path | None,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a checkpoint folder; config.json comes last, so a folder that has one is complete.

    Args:
        folder: created if missing.
        config: contents of config.json.
        tensors: names and values, read one by one.
        tokenizer: folder whose tokenizer files are copied.
        shard_bytes: largest size of a shard; the default is that of the hub's own tools.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    try:
        _write_shards(folder, tensors, shard_bytes)
    finally:
        for left in folder.glob(_UNFINISHED.format("*")):
            left.unlink()
    for name in _TOKENIZER_FILES:
        if tokenizer is not None and (tokenizer / name).is_file():
            with files.replacing(folder / name) as copy:
                shutil.copyfile(tokenizer / name, copy)
    _write_json(folder / "config.json", config)


def _write_shards(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int) -> None:
    """Write shards under temporary names, because their names contain the number of shards, and then the index."""
    number_of: dict[str, int] = {}
    count = total = 0
    for count, shard in enumerate(_batches(tensors, shard_bytes), start=1):
        save_file(shard, folder / _UNFINISHED.format(count), metadata={"format": "pt"})
        number_of |= dict.fromkeys(shard, count)
        total += sum(tensor.nbytes for tensor in shard.values())
    for old in (*folder.glob("model-*-of-*.safetensors"), folder / _ONE, folder / _INDEX):
        old.unlink(missing_ok=True)
    names = [_ONE] if count == 1 else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    for number, name in enumerate(names, start=1):
        os.replace(folder / _UNFINISHED.format(number), folder / name)
    if count > 1:
        weight_map = {tensor: names[number - 1] for tensor, number in number_of.items()}
        _write_json(folder / _INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _batches(tensors: Iterable[tuple[str, torch.Tensor]], limit: int) -> Iterator[dict[str, torch.Tensor]]:
    """Consecutive tensors, of at most `limit` bytes together or a single larger one."""
    batch: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if batch and size + tensor.nbytes > limit:
            yield batch
            batch, size = {}, 0
        batch[name] = tensor.contiguous()
        size += tensor.nbytes
    yield batch


def read_tokenizer(folder: Path) -> tuple[Tokenizer, int | None]:
    """A tokenizer folder's tokenizer and the id of its end-of-document token (its `eos_token`), if it has one.

    Raises:
        ConversionProblems: there is no tokenizer.json.
    """
    if not (folder / "tokenizer.json").is_file():
        raise ConversionProblems([f"--tokenizer {folder}: no tokenizer.json there."])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    path = folder / _TOKENIZER_CONFIG
    token = json.loads(path.read_text()).get("eos_token") if path.is_file() else None
    name = token["content"] if isinstance(token, dict) else token
    return tokenizer, tokenizer.token_to_id(name or "<|endoftext|>")


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    files.write_atomically(path, json.dumps(value, indent=2, sort_keys=True) + "\n")
