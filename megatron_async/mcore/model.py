# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Megatron's model: builders, layers of a stage, observers of modules."""

import contextlib
import io
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_linear_attention_pattern
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.pipeline_parallel.utils import (
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import get_attr_wrapped_model

from megatron_async.mcore.training import gpt_config_from_args


def softmax_attentions(chunks: Sequence[torch.nn.Module]) -> list[Any]:
    """The self-attention modules with queries and keys of model chunks, in order of their layers."""
    kinds = (SelfAttention, MultiLatentAttention)
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, kinds)]


def replaced_weights(chunk: torch.nn.Module) -> list[tuple[int, ...]]:
    """Shapes of this rank's weights that Megatron draws and then throws away while it builds a model chunk.

    Multi-latent attention builds its output projection twice (core/transformer/attention.py, then
    core/transformer/multi_latent_attention.py), the first time for heads of `kv_channels`.
    """
    attentions = [module for module in chunk.modules() if isinstance(module, MultiLatentAttention)]
    return [
        (module.config.hidden_size, module.num_attention_heads_per_partition * module.config.kv_channels)
        for module in attentions
    ]


def watch_logits(attention: Any, record: Callable[[torch.Tensor], None]) -> None:
    """Report the largest logits of every training forward of an attention module, recomputed ones too.

    Logits are the scaled inputs of the softmax, without masked positions.

    - Megatron's local attention has them in one place, between the mask and the softmax
      (core/fusions/fused_softmax.py: `mask_output = self.mask_func(input, mask) if mask is not None else input`). The
      fused softmax kernels go around it. No mask is a sequence of one token, whose softmax does not depend on logits.
    - Transformer Engine's attention collects them itself where `config.qk_clip` or `config.log_max_attention_logit` is
      set (core/extensions/transformer_engine.py: `self.current_max_attn_logits = batch_max_attention_logits`).

    Args:
        attention: as from `softmax_attentions`.
        record: receives the largest logit of each head of this rank over a micro-batch, [heads].

    Raises:
        ValueError: the attention is of another kind.
    """
    core = attention.core_attention
    if isinstance(core, DotProductAttention):
        softmax, mask = core.scale_mask_softmax, core.scale_mask_softmax.mask_func

        def mask_and_record(scores: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            masked: torch.Tensor = mask(scores, attention_mask)
            if softmax.training:
                record(masked.detach().amax(dim=(0, 2, 3)))  # of [micro-batch, heads, queries, keys]
            return masked

        softmax.mask_func = mask_and_record
    elif hasattr(core, "current_max_attn_logits"):

        def take(module: Any, inputs: Any, output: Any) -> None:
            if module.training and module.current_max_attn_logits is not None:
                record(module.current_max_attn_logits)
            module.current_max_attn_logits = None

        core.register_forward_hook(take)
    else:
        raise ValueError(
            f"{type(core).__name__} does not report attention logits: leave --qk-clip and --log-max-attention-logit "
            "out, or use --transformer-impl local"
        )


def linear_attention_pattern(config: Any) -> list[int]:
    """1 for each layer with linear attention, 0 for each with softmax attention."""
    if config.experimental_attention_variant is None:
        return [0] * config.num_layers
    return get_linear_attention_pattern(config)


def layers_of_stage(config: Any, vp_stage: int | None = None, pp_rank: int | None = None) -> list[int]:
    """Numbers, from 0, of the layers on a pipeline stage; this rank's unless `pp_rank` names another."""
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        return list(layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage, pp_rank=pp_rank))
    first = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=pp_rank)
    return list(range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pp_rank)))


def layers_by_part(layout: str) -> list[int]:
    """Number of decoder layers in each part of a `--pipeline-model-parallel-layout`.

    Raises:
        AssertionError: a letter that Megatron does not know.
    """
    return [part.count(LayerType.decoder) for part in PipelineParallelLayerLayout.parse_str_to_list(layout)]


def layers_by_chunk(args: Any) -> list[list[list[int]]]:
    """Numbers, from 0, of the layers in every chunk of every stage; needs no process groups."""
    stages, chunks = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
    if args.hybrid_layer_pattern is not None:
        counts = [len(part) for part in args.hybrid_layer_pattern.split(Symbols.PIPE)]
    elif args.pipeline_model_parallel_layout is not None:
        counts = layers_by_part(str(args.pipeline_model_parallel_layout))
    else:
        config = gpt_config_from_args(args).transformer
        virtual = [None] if chunks is None else list(range(chunks))
        return [[layers_of_stage(config, chunk, stage) for chunk in virtual] for stage in range(stages)]
    numbers = itertools.count()
    in_order = [[next(numbers) for _ in range(count)] for count in counts]
    return [in_order[stage::stages] for stage in range(stages)]


def layers_of_gpt_layer(config: Any) -> int:
    """2 for a HybridModel that is built from the arguments of a GPT and has the names of the GPT; otherwise 1."""
    return getattr(config, "layers_of_gpt_layer", 1)


def build_model(config: Any, groups: ProcessGroupCollection, vp_stage: int | None) -> torch.nn.Module:
    """One model chunk of this rank, unwrapped, of the class that the configuration is for."""
    virtual = config.transformer.virtual_pipeline_model_parallel_size
    with contextlib.redirect_stdout(io.StringIO()):
        return config.get_builder_cls()(config).build_model(
            groups,
            # HybridModel's builder does not know virtual stages.
            pre_process=is_vp_first_stage(vp_stage or 0, virtual) and is_pp_first_stage(groups.pp),
            post_process=is_vp_last_stage(vp_stage or 0, virtual) and is_pp_last_stage(groups.pp),
            vp_stage=vp_stage,
        )


def tied_embedding(chunk: torch.nn.Module) -> torch.nn.Parameter | None:
    """The weight shared by embedding and output layer, where this rank holds one of its two copies; else None."""
    model = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
    if mpu.get_pipeline_model_parallel_world_size() == 1 or not model.share_embeddings_and_output_weights:
        return None
    return model.shared_embedding_or_output_weight() if model.pre_process or model.post_process else None


def tied_copies_differ(chunks: list[Any]) -> bool:
    """Whether the first and the last stage hold unequal copies of the tied embedding. Collective over these two."""
    copies = [weight for chunk in chunks if (weight := tied_embedding(chunk)) is not None]
    if not copies:
        return False
    # Sum and norm say enough, and need no room for another copy.
    sums = [copies[0].sum(dtype=torch.float64), torch.linalg.vector_norm(copies[0], dtype=torch.float64)]
    low, high = torch.stack(sums).detach(), torch.stack(sums).detach()
    torch.distributed.all_reduce(low, torch.distributed.ReduceOp.MIN, group=mpu.get_embedding_group())
    torch.distributed.all_reduce(high, torch.distributed.ReduceOp.MAX, group=mpu.get_embedding_group())
    return not torch.equal(low, high)


def biased_routers(chunk: torch.nn.Module) -> list[Any]:
    """The routers whose bias an update moves."""
    biased = (module for module in chunk.modules() if getattr(module, "expert_bias", None) is not None)
    return [router for router in biased if not router.frozen_expert_bias]
