# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's HybridModel: a pattern of layers (`--hybrid-layer-pattern`), stages separated by `|`.

| Letter | Layer |
|---|---|
| M | Mamba-2 |
| G | Gated DeltaNet |
| * | attention |
| - | dense feed-forward block |
| E | experts |
"""

import argparse
import re
from collections.abc import Iterator, Mapping
from itertools import batched, islice
from typing import Any

from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from megatron_async.mcore.arguments import layers_of_stages
from megatron_async.mcore.model import gpu_stack_spec, linear_attention_pattern, moe_layer_pattern
from megatron_async.mcore.training import HybridModelConfig
from megatron_async.models.gated_delta_net import GatedDeltaNet
from megatron_async.models.mamba import MambaMixer
from megatron_async.models.norms import HeadNorm, RMSNorm
from megatron_async.models.specs import LocalBackend, delta_net, local_submodules

LETTERS = {
    Symbols.MAMBA: "Mamba",
    Symbols.GDN: "Gated DeltaNet",
    Symbols.ATTENTION: "attention",
    Symbols.MLP: "feed-forward",
    Symbols.MOE: "experts",
}


_MIXERS, _BLOCKS = (Symbols.ATTENTION, Symbols.GDN), (Symbols.MLP, Symbols.MOE)


def layers_of(pattern: str) -> str:
    """The letters of a pattern without the ends of its stages."""
    return pattern.replace(Symbols.PIPE, "")


def has(args: argparse.Namespace, letter: str) -> bool:
    """Whether a run's model is a HybridModel with layers of one kind."""
    return args.hybrid_layer_pattern is not None and letter in args.hybrid_layer_pattern


def mamba_heads(args: argparse.Namespace) -> int:
    """Heads of a Mamba layer: without --mamba-num-heads its inner size is twice the hidden size, as in Megatron."""
    return args.mamba_num_heads or 2 * (args.hidden_size or 0) // args.mamba_head_dim


def continues_gpt(pattern: str | None, saved: Mapping[str, Any]) -> bool:
    """Whether a pattern is the model of a saved GPT: attention and a block in turn, the same number of times."""
    block = Symbols.MLP if saved.get("num_experts") is None else Symbols.MOE
    gpt = saved.get("hybrid_layer_pattern") is None and saved.get("experimental_attention_variant") is None
    return gpt and pattern is not None and layers_of(pattern) == (Symbols.ATTENTION + block) * saved["num_layers"]


def complete(args: argparse.Namespace, stages: int) -> None:
    """Set the number of layers from the pattern, as Megatron does, and cut a pattern without stages evenly.

    Args:
        args: parsed arguments with a pattern.
        stages: of the pipeline, virtual ones included.
    """
    pattern = args.hybrid_layer_pattern
    args.num_layers = len(layers_of(pattern))
    size, rest = divmod(args.num_layers, max(stages, 1))
    uneven = args.decoder_first_pipeline_num_layers or args.decoder_last_pipeline_num_layers
    if Symbols.PIPE not in pattern and size and not rest and not uneven:
        args.hybrid_layer_pattern = Symbols.PIPE.join(map("".join, batched(pattern, size)))


def from_gpt(args: argparse.Namespace) -> None:
    """Turn checked arguments of a GPT into those of the HybridModel with the same layers on the same stages."""
    linear = linear_attention_pattern(args)
    experts = moe_layer_pattern(args) if args.num_experts is not None else [0] * args.num_layers
    letters = iter([_MIXERS[mixer] + _BLOCKS[block] for mixer, block in zip(linear, experts, strict=True)])
    stages = [islice(letters, number) for number in layers_of_stages(args)]
    args.hybrid_layer_pattern = Symbols.PIPE.join("".join(stage) for stage in stages)
    args.num_layers *= 2
    args.pipeline_model_parallel_layout = args.num_virtual_stages_per_pipeline_rank = None
    args.decoder_first_pipeline_num_layers = args.decoder_last_pipeline_num_layers = None
    args.experimental_attention_variant = args.linear_attention_freq = None
    args.moe_layer_freq = 1


def name_in_gpt(pattern: str, name: str) -> str:
    """Name that a parameter has in the GPT with the same layers; where there is none, its own name."""
    layers = layers_of(pattern)
    if layers and set(layers[::2]) <= set(_MIXERS) and set(layers[1::2]) <= set(_BLOCKS):
        name = re.sub(r"(?<=decoder\.layers\.)\d+", lambda number: str(int(number[0]) // 2), name)
    return name


class LocalStack(HybridStack):
    """A stack whose final norm is a local module; Megatron's is Transformer Engine's."""

    def __init__(self, config: Any, *args: Any, post_layer_norm: bool = True, **kwargs: Any) -> None:
        super().__init__(config, *args, post_layer_norm=False, **kwargs)
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            self.final_norm = _norm(config)(config, config.hidden_size, config.layernorm_epsilon)


def stack_spec(config: HybridModelConfig) -> ModuleSpec:
    """Modules of each kind of layer, local (torch) or Transformer Engine's.

    Local modules have separate norms; checkpoints give these the names of the fused GPU modules, so that local and GPU
    runs read each other's.
    """
    transformer = config.transformer
    if transformer.transformer_impl != "local":
        spec = gpu_stack_spec()
        spec.submodules.mamba_layer.submodules.mixer.module = MambaMixer
        linear = spec.submodules.gdn_layer.submodules.self_attention
        linear.module, linear.submodules.out_norm = GatedDeltaNet, HeadNorm
        return spec
    norm, backend = _norm(transformer), LocalBackend()
    dense, experts = local_submodules(transformer, experts=False), None
    if transformer.num_moe_experts is not None:
        experts = local_submodules(transformer, experts=True)
    add = dense.self_attn_bda

    def layer(module: type, names: dict[str, str], **modules: Any) -> ModuleSpec:
        return ModuleSpec(module, submodules=TransformerLayerSubmodules(**modules, sharded_state_dict_keys_map=names))

    return ModuleSpec(
        LocalStack,
        submodules=HybridStackSubmodules(
            mamba_layer=ModuleSpec(
                MambaLayer,
                submodules=MambaLayerSubmodules(
                    norm=norm,
                    mixer=ModuleSpec(
                        MambaMixer,
                        submodules=MambaMixerSubmodules(
                            in_proj=backend.column_parallel_linear(), out_proj=backend.row_parallel_linear()
                        ),
                    ),
                    mamba_bda=add,
                    sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
                ),
            ),
            gdn_layer=layer(TransformerLayer, {}, self_attention=delta_net(backend), self_attn_bda=add),
            attention_layer=layer(
                TransformerLayer,
                {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"},
                input_layernorm=norm,
                self_attention=dense.self_attention,
                self_attn_bda=add,
            ),
            mlp_layer=layer(
                MLPLayer,
                {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"},
                pre_mlp_layernorm=norm,
                mlp=dense.mlp,
                mlp_bda=add,
            ),
            moe_layer=layer(MoETransformerLayer, {}, pre_mlp_layernorm=norm, mlp=experts and experts.mlp, mlp_bda=add),
        ),
    )


def _norm(transformer: Any) -> Any:
    if transformer.normalization == "RMSNorm":
        return RMSNorm
    return LocalBackend().layer_norm(rms_norm=False)


def problems(args: argparse.Namespace) -> Iterator[str]:
    """Problems with `--hybrid-layer-pattern`, with the position in the pattern (from 0)."""
    pattern = args.hybrid_layer_pattern
    if pattern is None:
        return
    option = f"--hybrid-layer-pattern {pattern}"
    known = ", ".join(f"{letter} {name}" for letter, name in LETTERS.items())
    for position, letter in enumerate(pattern):
        if letter not in LETTERS and letter != Symbols.PIPE:
            yield f"{option}: {letter!r} at position {position} is not a layer that is supported here. Use {known}, |."
    stages = pattern.split(Symbols.PIPE)
    for number, stage in enumerate(stages[1:-1], start=1):  # embedding and head can be stages of their own
        if not stage:
            yield f"{option}: stage {number} (from 0) has no layer. Give it one, or use fewer stages."
    yield from _sizes(args, option)
    if args.reset_attention_mask and Symbols.MAMBA in pattern:
        yield f"{option} with --reset-attention-mask: Mamba layers carry their state across documents. Leave it out."


def _sizes(args: argparse.Namespace, option: str) -> Iterator[str]:
    if has(args, Symbols.MOE) and args.num_experts is None:
        position = args.hybrid_layer_pattern.index(Symbols.MOE)
        yield f"{option}: E at position {position} needs --num-experts, --moe-ffn-hidden-size and --moe-router-topk."
    if not has(args, Symbols.MOE) and args.num_experts is not None:
        yield f"--num-experts {args.num_experts}: {option} has no E. Add one, or leave --num-experts out."
    if has(args, Symbols.MAMBA):
        heads = mamba_heads(args)
        for name, number in (("--mamba-num-heads", heads), ("--mamba-num-groups", args.mamba_num_groups)):
            if number % args.tensor_model_parallel_size:
                yield (
                    f"{name} {number} cannot be divided among --tensor-model-parallel-size "
                    f"{args.tensor_model_parallel_size} ranks. Change one of them."
                )
        if heads % args.mamba_num_groups:
            yield f"{heads} Mamba heads cannot be divided among --mamba-num-groups {args.mamba_num_groups}. Change one."
