# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Whole conversions between Megatron checkpoints and Hugging Face folders, in one process."""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from megatron_async.models import one_process
from megatron_async.models.huggingface import folder as folders
from megatron_async.models.huggingface.architecture import (
    Architecture,
    ConversionProblems,
    from_arguments,
    from_config,
    to_arguments,
    to_config,
)
from megatron_async.models.huggingface.mapping import Rule, matched
from megatron_async.models.naming import global_names
from megatron_async.planning import resolve

_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_WEIGHTS_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def export(
    checkpoint: Path,
    output: Path,
    *,
    vocabulary: int | None = None,
    tokenizer: Path | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = folders.SHARD_BYTES,
) -> Architecture:
    """Write a Megatron checkpoint of any layout as a Hugging Face folder.

    Args:
        checkpoint: folder of one checkpoint, as `checkpoint.folder.locate` finds it.
        output: folder to write.
        vocabulary: true vocabulary size; None takes what the checkpoint's arguments say, or its padded size.
        tokenizer: folder whose tokenizer files are copied.
        dtype: type of the weights; None keeps the checkpoint's.
        shard_bytes: largest shard.

    Raises:
        ConversionProblems: the model has no counterpart.
    """
    args = one_process.arguments_of(checkpoint)
    known = getattr(args, "tokenizer_vocab_size", None) or args.vocab_size or args.padded_vocab_size
    architecture = from_arguments(args, vocabulary or known)
    if architecture.vocabulary > args.padded_vocab_size:
        raise ConversionProblems(
            [f"vocabulary {architecture.vocabulary} is larger than the checkpoint's table of {args.padded_vocab_size}."]
        )
    with one_process.model(args, initialize=False) as model:
        one_process.load(model, checkpoint)
        kept = dtype or args.params_dtype
        tensors = to_hugging_face(model, architecture)
        converted = ((name, tensor.to(kept)) for name, tensor in tensors)
        config = to_config(architecture, _WEIGHTS_NAMES[kept], end_of_text=None)
        folders.write(output, config, converted, tokenizer=tokenizer, shard_bytes=shard_bytes)
    return architecture


def to_hugging_face(model: torch.nn.Module, architecture: Architecture) -> Iterator[tuple[str, torch.Tensor]]:
    """Hugging Face's names and tensors of a whole model."""
    params = dict(global_names(model))
    for name, targets, rule in matched(params, architecture):
        weight = _true_rows(name, params[name].detach(), architecture)
        yield from zip(targets, rule.split(weight), strict=True)


def from_hugging_face(model: torch.nn.Module, architecture: Architecture, source: Path) -> None:
    """Fill a whole model's parameters from a folder, after checking every tensor of it.

    Padded rows of the vocabulary become zero.

    Raises:
        ConversionProblems: names each tensor that is missing, unknown or of another shape.
    """
    params = dict(global_names(model))
    table = list(matched(params, architecture))
    weights = folders.Weights(source, _expected(params, table, architecture))
    with torch.no_grad():
        for name, sources, rule in table:
            joined = rule.join(tuple(weights[source] for source in sources))
            if name in _VOCABULARY:
                params[name].zero_()
                params[name][: joined.shape[0]].copy_(joined)
            else:
                params[name].copy_(joined)


def import_arguments(source: Path) -> tuple[Architecture, list[str]]:
    """The architecture of a folder and Megatron's arguments for it."""
    architecture = from_config(folders.read_config(source))
    return architecture, to_arguments(architecture)


def one_process_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Checked arguments of a model on one CPU process that reads no data."""
    from megatron_async.config import arguments  # it knows every module of the package, this one included

    run = "--device cpu --mock-data --tokenizer-type NullTokenizer --micro-batch-size 1 --train-iters 1".split()
    args = arguments.parse([*run, *words])
    resolve.pad_vocabulary(args)
    return args


def _expected(
    params: dict[str, torch.nn.Parameter],
    table: Iterable[tuple[str, tuple[str, ...], Rule]],
    architecture: Architecture,
) -> dict[str, tuple[int, ...]]:
    """Shapes of Hugging Face's tensors, by running the table on tensors without storage."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, targets, rule in table:
        weight = _true_rows(name, torch.empty(params[name].shape, device="meta"), architecture)
        shapes |= {target: tuple(part.shape) for target, part in zip(targets, rule.split(weight), strict=True)}
    return shapes


def _true_rows(name: str, weight: torch.Tensor, architecture: Architecture) -> torch.Tensor:
    return weight[: architecture.vocabulary] if name in _VOCABULARY else weight
