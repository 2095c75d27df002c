# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Rules for the model on its layout."""

import argparse
from collections.abc import Iterator

from megatron_async.mcore.arguments import objection_of
from megatron_async.mcore.model import layers_by_part
from megatron_async.models import gpt as language_model
from megatron_async.models import hybrid, latent_attention
from megatron_async.platform.packages import APEX, FLASH_LINEAR_ATTENTION, MAMBA_SSM, TRANSFORMER_ENGINE

_ACTIVATIONS = ("swiglu", "squared_relu", "quick_geglu")


def problems(args: argparse.Namespace) -> Iterator[str]:
    """Problems with parsed values."""
    yield from divisibility(args)
    yield from _experts(args)
    yield from _empty_stages(args)
    yield from _sequences(args)
    yield from hybrid.problems(args)
    yield from latent_attention.problems(args)
    yield from _norms(args)
    activations = [f"--{name.replace('_', '-')}" for name in _ACTIVATIONS if getattr(args, name)]
    if len(activations) > 1:
        yield f"{' and '.join(activations)}: a feed-forward block has one activation function. Leave one of them out."
    if args.device == "cuda" and not args.dry_run:
        yield from _optional_packages(args)


def derived_problems(args: argparse.Namespace) -> Iterator[str]:
    """Problems with values that Megatron has derived: its own checks of the model's configuration."""
    try:
        language_model.model_config(_with_vocabulary(args)).finalize()
    except (AssertionError, ValueError, TypeError, RuntimeError) as error:
        yield objection_of(error)


def divisibility(args: argparse.Namespace) -> Iterator[str]:
    """Sizes of the model that do not divide among tensor- or expert-parallel ranks."""
    linear, mamba = _has_delta_net(args), hybrid.has(args, "M")
    latents = args.multi_latent_attention and args.transformer_impl == "local"
    latent, rotary = args.kv_lora_rank, args.qk_pos_emb_head_dim
    parts = {
        "--num-attention-heads": args.num_attention_heads,
        "--linear-num-key-heads": linear and args.linear_num_key_heads,
        "--linear-num-value-heads": linear and args.linear_num_value_heads,
        "--q-lora-rank": latents and args.q_lora_rank,
        f"--kv-lora-rank {latent} + --qk-pos-emb-head-dim {rotary} =": latents and latent + rotary,
        "--mamba-num-heads": mamba and hybrid.mamba_heads(args),
        "--mamba-num-groups": mamba and args.mamba_num_groups,
        "--num-experts": args.num_experts,
    }
    for flag, number in parts.items():
        size = "expert_model_parallel_size" if flag == "--num-experts" else "tensor_model_parallel_size"
        ranks = getattr(args, size)
        if number and ranks > 0 and number % ranks:
            yield (
                f"{flag} {number} cannot be divided among --{size.replace('_', '-')} {ranks} ranks. Change one of them."
            )


def _experts(args: argparse.Namespace) -> Iterator[str]:
    if args.num_experts is not None and args.moe_router_topk > args.num_experts:
        yield f"--moe-router-topk {args.moe_router_topk} is more than --num-experts {args.num_experts}."
    factor = args.moe_expert_capacity_factor
    filled = args.moe_pad_expert_input_to_capacity and args.num_experts is not None and factor is not None
    if filled and factor * args.moe_router_topk > args.num_experts:
        yield (
            f"--moe-expert-capacity-factor {factor} with --moe-pad-expert-input-to-capacity: an expert would be filled "
            f"with more tokens than there are; at most --num-experts / --moe-router-topk = "
            f"{args.num_experts / args.moe_router_topk:g}."
        )
    if args.moe_router_enable_expert_bias and args.moe_pad_expert_input_to_capacity:
        yield (
            "--moe-router-enable-expert-bias with --moe-pad-expert-input-to-capacity: every expert is filled up to the "
            "same number of tokens, which the routers count, so the bias would never move. Leave one of them out."
        )


def _empty_stages(args: argparse.Namespace) -> Iterator[str]:
    """Layouts in which a pipeline stage has no layer, or a layer has no stage."""
    stages, layers, layout = args.pipeline_model_parallel_size, args.num_layers, args.pipeline_model_parallel_layout
    if layers is None or stages < 2:
        return
    if isinstance(layout, str):
        yield from _layout(layout, layers)
        return
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    between = stages - (first is not None) - (last is not None)
    left = layers - (first or 0) - (last or 0)
    if first == 0 or last == 0 or left < between:
        given = f"--num-layers {layers} over --pipeline-model-parallel-size {stages}"
        given += f", --decoder-first-pipeline-num-layers {first}" if first is not None else ""
        given += f", --decoder-last-pipeline-num-layers {last}" if last is not None else ""
        yield f"{given}: leaves a stage without a layer. Use at most {layers} stages and give each at least one layer."


def _layout(layout: str, layers: int) -> Iterator[str]:
    option = f"--pipeline-model-parallel-layout {layout}"
    for number, part in enumerate(layout.split("|")):
        if not part.strip():
            yield (
                f"{option}: part {number} (from 0) is empty, so its stage would compute nothing. Give it a layer, or "
                "use fewer stages."
            )
    try:
        count = sum(layers_by_part(layout))
    except AssertionError as error:
        yield f"{option}: {error}"
        return
    if count != layers:
        yield (
            f"{option} places {count} decoder layers (t), --num-layers is {layers}: every layer must be on one stage. "
            "Change one of them."
        )


def _sequences(args: argparse.Namespace) -> Iterator[str]:
    """Sequences that the forward step would not pass to the model as asked."""
    if args.one_document_per_sequence:
        yield from _documents(args)
    if args.reset_attention_mask and args.transformer_impl == "transformer_engine":
        yield (
            "--reset-attention-mask with --transformer-impl transformer_engine: its causal kernels ignore the mask, "
            "and documents would see each other. Use --transformer-impl local."
        )
    if args.reset_attention_mask and not args.create_attention_mask_in_dataloader:
        yield (
            "--reset-attention-mask with --no-create-attention-mask-in-dataloader: the mask holds the boundaries. "
            "Leave one of them out."
        )
    kernels = args.device == "cuda" and not args.deterministic_mode
    if args.reset_attention_mask and kernels and _has_delta_net(args):
        yield (
            "Gated DeltaNet with --reset-attention-mask: its GPU kernels would carry their state from one document to "
            "the next. Use --deterministic-mode, which computes in torch."
        )


def _norms(args: argparse.Namespace) -> Iterator[str]:
    """What torch's LayerNorm lacks; Transformer Engine, Apex and this package's RMSNorm have it."""
    fused = args.transformer_impl != "local" or (args.device == "cuda" and APEX.usable)
    if fused or args.normalization != "LayerNorm":
        return
    for flag, given in {
        "--apply-layernorm-1p": args.layernorm_zero_centered_gamma,
        "--sequence-parallel": args.sequence_parallel and args.tensor_model_parallel_size > 1,
    }.items():
        if given:
            yield f"{flag} with --normalization LayerNorm: torch's LayerNorm cannot do it. Use --normalization RMSNorm."


def _documents(args: argparse.Namespace) -> Iterator[str]:
    if not args.calculate_per_token_loss:
        yield (
            "--one-document-per-sequence without --calculate-per-token-loss: micro-batches have different numbers of "
            "tokens, and their means would weigh the same. Add --calculate-per-token-loss."
        )
    ignored = ("mock_data", "dataloader_fast_cache_load", "dataloader_defer_npy_index_mmap")
    if found := [f"--{name.replace('_', '-')}" for name in ignored if getattr(args, name)]:
        yield f"--one-document-per-sequence needs data files and no caches; leave {', '.join(found)} out."


def _has_delta_net(args: argparse.Namespace) -> bool:
    return args.experimental_attention_variant == "gated_delta_net" or hybrid.has(args, "G")


def _optional_packages(args: argparse.Namespace) -> Iterator[str]:
    """Packages without which a run on GPUs cannot do what is asked."""
    if args.transformer_impl == "transformer_engine" and not TRANSFORMER_ENGINE.usable:
        yield (
            f"--transformer-impl transformer_engine (the default on GPUs): {TRANSFORMER_ENGINE.lack}. "
            f"{TRANSFORMER_ENGINE.install}; or give --transformer-impl local, which computes in torch."
        )
    kernels = {
        "Gated DeltaNet": (_has_delta_net(args), FLASH_LINEAR_ATTENTION),
        "Mamba": (hybrid.has(args, "M"), MAMBA_SSM),
    }
    for layers, (given, package) in kernels.items():
        if given and not args.deterministic_mode and not package.usable:
            yield (
                f"{layers} on GPUs: {package.lack}. {package.install}; or give --deterministic-mode, which computes "
                "in torch."
            )


def _with_vocabulary(args: argparse.Namespace) -> argparse.Namespace:
    """A copy with some vocabulary size: the tokenizer, which knows the true one, is not built yet."""
    copy = argparse.Namespace(**vars(args))
    if copy.vocab_size is None and getattr(copy, "padded_vocab_size", None) is None:
        copy.vocab_size = copy.make_vocab_size_divisible_by
    return copy
