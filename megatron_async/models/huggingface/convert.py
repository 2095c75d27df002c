# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Whole conversions between Megatron checkpoints and Hugging Face folders, in one process."""

import logging
from collections.abc import Iterator
from pathlib import Path

import torch

from megatron_async.mcore.checkpoint import load_model_weights
from megatron_async.models import one_process
from megatron_async.models.huggingface import folder as folders
from megatron_async.models.huggingface.architecture import (
    Architecture,
    ConversionProblems,
    from_arguments,
    rules,
    to_config,
)
from megatron_async.models.huggingface.weights import ROUTER_BIAS, Rule
from megatron_async.models.naming import global_name, global_names
from megatron_async.models.vocabulary import TABLES

_log = logging.getLogger(__name__)


def export(
    checkpoint: Path,
    output: Path,
    *,
    vocabulary: int | None = None,
    tokenizer: Path | None = None,
    dtype: torch.dtype | None = None,
) -> Architecture:
    """Write a Megatron checkpoint of any layout as a Hugging Face folder.

    Args:
        checkpoint: folder of one checkpoint, as `checkpoint.folder.locate` finds it.
        output: folder to write.
        vocabulary: true vocabulary size; None takes the tokenizer's, else the one in the checkpoint's arguments.
        tokenizer: folder whose tokenizer files are copied.
        dtype: type of the weights; None keeps the checkpoint's.

    Raises:
        ConversionProblems: the model has no counterpart; the folder of the tokenizer has none.
    """
    args = one_process.arguments_of(checkpoint)
    known = getattr(args, "tokenizer_vocab_size", None) or args.vocab_size or args.padded_vocab_size
    end_of_text = getattr(args, "tokenizer_end", None)
    if tokenizer is not None:
        read, end = folders.read_tokenizer(tokenizer)
        known, end_of_text = read.get_vocab_size(), end_of_text if end is None else end
    architecture = from_arguments(args, vocabulary or known)
    if end_of_text is None or not 0 <= end_of_text < architecture["vocab_size"]:
        end_of_text = None
        _log.warning("no end-of-document token is known: generation will not stop by itself. Give --tokenizer FOLDER.")
    if architecture["vocab_size"] > args.padded_vocab_size:
        wrong = f"vocabulary {architecture['vocab_size']} is larger than the checkpoint's table"
        raise ConversionProblems([f"{wrong} of {args.padded_vocab_size}."])
    kept = dtype or args.params_dtype
    with one_process.model(args, initialize=False) as model:
        load_model_weights(model, checkpoint)
        tensors = (
            (name, tensor if name.endswith(ROUTER_BIAS) else tensor.to(kept))
            for name, tensor in to_hugging_face(model, architecture)
        )
        config = to_config(architecture, str(kept).removeprefix("torch."), end_of_text)
        folders.write(output, config, tensors, tokenizer=tokenizer)
    return architecture


def to_hugging_face(model: torch.nn.Module, architecture: Architecture) -> Iterator[tuple[str, torch.Tensor]]:
    """Hugging Face's names and tensors of a whole model."""
    for rule, param, rows in _table(model, architecture):
        yield from zip(rule.names, rule.split(param[:rows]), strict=True)


def from_hugging_face(model: torch.nn.Module, architecture: Architecture, source: Path) -> list[str]:
    """Fill a whole model's parameters from a folder, after checking every tensor of it.

    Padded rows of the vocabulary become zero.

    Returns:
        Names of tensors that the model's type has rounded.

    Raises:
        ConversionProblems: names each tensor that is missing, unknown or of another shape.
    """
    table = list(_table(model, architecture))
    expected: dict[str, tuple[int, ...]] = {}
    for rule, param, rows in table:
        parts = rule.split(torch.empty(param[:rows].shape, device="meta"))
        expected |= {name: tuple(part.shape) for name, part in zip(rule.names, parts, strict=True)}
    weights = folders.Weights(source, expected)
    rounded: list[str] = []
    for rule, param, rows in table:
        joined = rule.join(tuple(weights[name] for name in rule.names))
        param.zero_()
        param[:rows].copy_(joined)
        if not torch.equal(param[:rows].to(joined.dtype), joined):
            rounded += rule.names
    return rounded


def _table(model: torch.nn.Module, architecture: Architecture) -> Iterator[tuple[Rule, torch.Tensor, int]]:
    """Rule, Megatron's weight and its true number of rows for every parameter and every bias of a router."""
    params: dict[str, torch.Tensor] = dict(global_names(model))
    rename = global_name(model)
    for name, buffer in model.named_buffers():
        if name.endswith(".expert_bias"):
            buffer.data = buffer.data.float()  # as Megatron's routers do before they save and load it
            params[rename(name)] = buffer
    for name, rule in rules(params, architecture):
        rows = architecture["vocab_size"] if name in TABLES else len(params[name])
        yield rule, params[name].detach(), rows
