# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's language models: the configuration from arguments, one micro-batch of data, the loss."""

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_tp_rank

from megatron_async.mcore.parallel import device
from megatron_async.mcore.training import gpt_config_from_args
from megatron_async.models import hybrid
from megatron_async.models.initialization import LayoutIndependentInit
from megatron_async.models.specs import layer_spec
from megatron_async.models.vocabulary import check_ids, mask_padding

Samples = Iterator[dict[str, torch.Tensor]] | None
"""Micro-batches on the host; None on ranks that read no data."""


def model_config(args: argparse.Namespace, vocabulary: int | None = None) -> Any:
    """Megatron's model configuration, with initial weights that depend on the seed and not on the layout.

    Args:
        args: checked arguments.
        vocabulary: true size; if given, padded rows of the vocabulary get no probability.

    Returns:
        Megatron's HybridModelConfig or GPTModelConfig, as `--model-class` says.
    """
    config: Any
    if args.model_class == "hybrid":
        config = hybrid.model_config(args)
    else:
        config = gpt_config_from_args(args)
        config.transformer_layer_spec = layer_spec
        config.rope_scaling_factor = args.rope_scaling_factor  # Megatron-LM 0.19 leaves its default
    initial = LayoutIndependentInit(args.seed, vocabulary)
    initial.watch(config.transformer)
    config.pre_wrap_hooks.append(initial.redraw)
    if vocabulary is not None:
        config.pre_wrap_hooks.append(partial(mask_padding, vocabulary))
    if args.freeze_all_layers:
        config.pre_wrap_hooks.append(freeze)
    return config


def freeze(chunks: list[Any]) -> list[Any]:
    """Train nothing in model chunks: neither parameters nor the biases of routers."""
    for chunk in chunks:
        chunk.requires_grad_(False)
        for module in chunk.modules():
            if hasattr(module, "frozen_expert_bias"):
                module.frozen_expert_bias = True
    return chunks


class ForwardStep:
    """Megatron's forward step for GPT pretraining: (data iterator, model) -> the model's output and its loss function.

    Args:
        args: checked arguments.
        vocabulary: true size; if given, token ids outside it raise a ValueError.
    """

    def __init__(self, args: argparse.Namespace, vocabulary: int | None = None) -> None:
        self._args, self._vocabulary = args, vocabulary
        self._groups = ProcessGroupCollection.use_mpu_process_groups()

    def __call__(self, data_iterator: Samples, model: Any) -> tuple[torch.Tensor, Any]:
        first = get_attr_wrapped_model(model, "pre_process")
        last = get_attr_wrapped_model(model, "post_process")
        batch = self._batch(data_iterator, first, last)
        inputs = (batch[key] for key in ("tokens", "position_ids", "attention_mask"))
        output = model(*inputs, labels=batch["labels"], loss_mask=batch["loss_mask"])
        return output, partial(loss, batch["loss_mask"])

    def _batch(self, data_iterator: Samples, first: bool, last: bool) -> dict[str, Any]:
        """One micro-batch: tokens and positions for the first chunk of the model, labels and loss mask for the last."""
        if first or last:
            return self._read(data_iterator, first, last)
        # Document boundaries hold in every layer, so every stage reads the mask.
        batch = self._read(data_iterator, False, True) if self._args.reset_attention_mask else {"attention_mask": None}
        return batch | dict.fromkeys(("tokens", "position_ids", "labels", "loss_mask"))

    def _read(self, data_iterator: Samples, first: bool, last: bool) -> dict[str, Any]:
        """The next micro-batch, broadcast from the first tensor-parallel rank."""
        args, groups = self._args, self._groups
        batch: dict[str, Any] = {}
        if groups.tp.rank() == 0:
            assert data_iterator is not None
            loaded = next(data_iterator)
            if self._vocabulary is not None:
                check_ids(loaded, self._vocabulary)
            batch = {key: value.to(device(), non_blocking=True) for key, value in loaded.items()}
            batch.setdefault("attention_mask", None)
        return get_batch_on_this_tp_rank(
            batch,
            has_cu_seqlens=False,
            is_hybrid_cp=False,
            create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
            broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
            broadcast_group=groups.tp,
            cp_size=1,
            tp_rank=groups.tp.rank(),
            micro_batch_size=args.micro_batch_size,
            seq_length=args.seq_length,
            mtp_on_this_rank=False,
            pipeline_model_parallel_size=groups.pp.size(),
            is_pipeline_first_stage=first,
            is_pipeline_last_stage=last,
        )


def loss(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of a micro-batch's token losses.

    Args:
        loss_mask: [micro-batch, sequence], 1 where a token counts.
        losses: [micro-batch, sequence], cross entropy of each token in nats.

    Returns:
        The sum (Megatron divides it before backward), the number of tokens that count, and both as "lm loss" for the
        log, so that averages are over tokens.
    """
    mask = loss_mask.reshape(-1).float()
    total = torch.sum(losses.reshape(-1).float() * mask)
    tokens = mask.sum().to(torch.int)
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.float()])}
