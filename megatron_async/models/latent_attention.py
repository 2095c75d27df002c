# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Multi-latent attention (DeepSeek-V2, arXiv 2405.04434) from local (torch) modules.

The layer is Megatron's. Its parameters have the names of Transformer Engine's fused modules in checkpoints, so local
and GPU runs read each other's.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from megatron.core.utils import divide

from megatron_async.models.norms import RMSNorm

CHECKPOINT_NAMES = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
"""Prefix of a local module's parameters -> their prefix in a checkpoint."""


class LatentDotProductAttention(DotProductAttention):
    """Megatron's local attention with heads of another size for values than for queries and keys.

    Megatron builds it twice (core/transformer/attention.py, then multi_latent_attention.py) and tells it the sizes of
    the heads the second time alone; the scale of the scores comes with them.
    """

    def __init__(self, config: Any, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.hidden_size_per_partition = divide(config.num_attention_heads, self.tp_group.size()) * v_channels


class LatentAttention(MLASelfAttention):
    """Megatron's layer with the whole gradient of the keys' rotary part, which all heads share.

    Every tensor-parallel rank has its heads' part of that gradient. Megatron sums the parts where it gathers the rotary
    part from ranks that hold parts of the sequence, as Transformer Engine's modules do, and not where a local down
    projection gives every rank the whole sequence.
    """

    def _qkv_down_projection(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents of queries and of keys and values, [sequence / tensor-parallel size, micro-batch, rank]."""
        queries, latents = super()._qkv_down_projection(hidden_states)
        if self.tp_group.size() > 1:
            latents = scatter_to_sequence_parallel_region(gather_from_tensor_model_parallel_region(latents))
        return queries, latents


def use_local(layer: TransformerLayerSubmodules, transformer: Any) -> None:
    """Give Megatron's local multi-latent attention what it lacks: value heads of their own size, RMSNorm."""
    layer.self_attention.module = LatentAttention
    modules = layer.self_attention.submodules
    modules.core_attention = LatentDotProductAttention
    if transformer.qk_layernorm and transformer.normalization == "RMSNorm":
        modules.q_layernorm = modules.kv_layernorm = RMSNorm
    layer.sharded_state_dict_keys_map |= CHECKPOINT_NAMES | {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}


def problems(args: argparse.Namespace) -> Iterator[str]:
    """Problems with the options of multi-latent attention."""
    if not args.multi_latent_attention:
        return
    tensor = args.tensor_model_parallel_size
    if tensor > 1 and not args.sequence_parallel:
        yield (
            f"--multi-latent-attention with --tensor-model-parallel-size {tensor} and without --sequence-parallel: "
            "Megatron-Core does not sum the gradient of the keys' rotary part over the ranks. Add --sequence-parallel."
        )
    if args.transformer_impl == "local" and args.qk_layernorm and args.q_lora_rank is None:
        yield (
            "--qk-layernorm with --multi-latent-attention and without --q-lora-rank: the norm of the queries needs "
            "their latent, or Transformer Engine. Give --q-lora-rank, or leave --qk-layernorm out."
        )
    for flag, given in {
        "--group-query-attention": args.group_query_attention,
        "--attention-output-gate": args.attention_output_gate,
    }.items():
        if given:
            yield f"{flag} with --multi-latent-attention: Megatron-Core has no such layer. Leave one of them out."
