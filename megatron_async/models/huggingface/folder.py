# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A Hugging Face checkpoint folder: config.json, safetensors shards with their index, tokenizer files."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron_async import files
from megatron_async.models.huggingface.architecture import ConversionProblems

SHARD_BYTES = 5_000_000_000
"""Largest shard, as the hub's own tools write them."""

_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
# Weights of a published checkpoint that a pretraining model has no use for: position tables of old Llama exports, and
# Qwen3-Next's extra layer that predicts a second token.
_IGNORED = ("rotary_emb.inv_freq", "mtp.")


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json.

    Raises:
        ConversionProblems: none there, or not JSON.
    """
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ConversionProblems([f"{path}: cannot be read ({error})."]) from error
    return config


class Weights:
    """Reads single tensors of a folder's shards.

    Args:
        folder: the checkpoint.
        expected: shape of every tensor that is needed.

    Raises:
        ConversionProblems: shards or tensors are missing, or have another shape, or are unknown; each is named.
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
        problems += list(_differences(found, expected))
        if problems:
            raise ConversionProblems(problems)

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._shard_of[name].get_tensor(name)
        return tensor


def _shards(folder: Path) -> list[str]:
    """Names of the files that the index lists, or of the only one."""
    index = folder / _INDEX
    if index.is_file():
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    return [_ONE]


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
    tensors: Iterator[tuple[str, torch.Tensor]],
    *,
    tokenizer: Path | None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a checkpoint folder; config.json comes last, so a folder that has one is complete.

    Args:
        folder: made if it does not exist.
        config: contents of config.json.
        tensors: names and values; taken one after the other.
        tokenizer: folder whose tokenizer files are copied.
        shard_bytes: largest size of a shard.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    shards = list(_write_shards(folder, tensors, shard_bytes))
    _name_shards(folder, shards)
    for name in _TOKENIZER_FILES:
        if tokenizer is not None and (tokenizer / name).is_file():
            with files.replacing(folder / name) as copy:
                shutil.copyfile(tokenizer / name, copy)
    _write_json(folder / "config.json", config)


def _write_shards(
    folder: Path, tensors: Iterator[tuple[str, torch.Tensor]], shard_bytes: int
) -> Iterator[tuple[Path, dict[str, int]]]:
    """Temporary files, each with the names and sizes in it."""
    shard: dict[str, torch.Tensor] = {}
    held = number = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if shard and held + size > shard_bytes:
            yield _write_shard(folder, number, shard)
            shard, held, number = {}, 0, number + 1
        shard[name] = tensor
        held += size
    yield _write_shard(folder, number, shard)


def _write_shard(folder: Path, number: int, shard: dict[str, torch.Tensor]) -> tuple[Path, dict[str, int]]:
    path = folder / f".shard-{number}.new"
    save_file({name: tensor.contiguous() for name, tensor in shard.items()}, path, metadata={"format": "pt"})
    return path, {name: tensor.numel() * tensor.element_size() for name, tensor in shard.items()}


def _name_shards(folder: Path, shards: list[tuple[Path, dict[str, int]]]) -> None:
    (folder / _INDEX).unlink(missing_ok=True)
    if len(shards) == 1:
        os.replace(shards[0][0], folder / _ONE)
        return
    (folder / _ONE).unlink(missing_ok=True)
    weight_map: dict[str, str] = {}
    for number, (path, sizes) in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        os.replace(path, folder / name)
        weight_map |= dict.fromkeys(sizes, name)
    total = sum(size for _, sizes in shards for size in sizes.values())
    _write_json(folder / _INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    files.write_atomically(path, json.dumps(value, indent=2, sort_keys=True) + "\n")
