# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's HybridModel: a pattern of layers (`--hybrid-layer-pattern`), stages separated by `|`.

| Letter | Layer |
|---|---|
| M | Mamba-2 |
| G | Gated DeltaNet |
| * | attention |
| + | multi-latent attention |
| - | dense feed-forward block |
| E | experts |
"""

import argparse
from collections.abc import Iterator, Mapping
from itertools import batched, chain
from typing import Any

from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_moe_layer_pattern
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols

from megatron_async.mcore.model import layers_by_chunk, linear_attention_pattern
from megatron_async.mcore.training import HybridModelBuilder, hybrid_config_from_args
from megatron_async.models.hybrid_stack import stack_spec

LETTERS = {
    Symbols.MAMBA: "Mamba",
    Symbols.GDN: "Gated DeltaNet",
    Symbols.ATTENTION: "attention",
    Symbols.MLA: "multi-latent attention",
    Symbols.MLP: "feed-forward",
    Symbols.MOE: "experts",
}
BEYOND_HYBRID = (
    *("use_rope_scaling", "rotary_interleaved"),
    *("no_rope_freq", "window_attn_skip_freq", "apply_query_key_layer_scaling"),
    "use_mup",
)
"""Arguments of a GPT that HybridModel does not read, that go by the number of a layer, or, the last, that Megatron
calls experimental there."""

MIXERS, BLOCKS = (Symbols.ATTENTION, Symbols.GDN, Symbols.MLA), (Symbols.MLP, Symbols.MOE)
"""Letters of the halves of a GPT's layer."""
NO_SPLIT = {
    "pipeline_model_parallel_layout": None,
    **dict.fromkeys(("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")),
    **dict.fromkeys(("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"), False),
}
"""Arguments that split the layers, where none does."""

_MEGATRONS_STACK = ("hybrid_stack_spec", "mamba_stack_spec")
"""Functions that --spec names for layers of Transformer Engine in Megatron-LM's own scripts, now and before."""


def take_older_options(args: argparse.Namespace) -> Iterator[str]:
    """Take what Megatron's scripts say in other words than --hybrid-layer-pattern; give a line for each."""
    if (pattern := args.hybrid_override_pattern) is not None and args.hybrid_layer_pattern is None:
        args.hybrid_layer_pattern, args.hybrid_override_pattern = pattern, None
        yield f"--hybrid-override-pattern {pattern} is taken as --hybrid-layer-pattern."
    if args.hybrid_layer_pattern is None:
        return
    if args.is_hybrid_model:
        args.is_hybrid_model = False
        yield "--is-hybrid-model has no effect here: --hybrid-layer-pattern says it."
    if args.spec and args.spec[-1] in _MEGATRONS_STACK:
        yield f"--spec {' '.join(args.spec)} has no effect here: --hybrid-layer-pattern chooses the layers."
        args.spec = None


def layers_of(pattern: str) -> str:
    """The letters of a pattern without the ends of its stages."""
    return pattern.replace(Symbols.PIPE, "")


def on_one_stage(args: argparse.Namespace) -> argparse.Namespace:
    """A copy of checked arguments whose one stage holds all layers."""
    alone = argparse.Namespace(**vars(args) | NO_SPLIT)
    alone.pipeline_model_parallel_size, alone.virtual_pipeline_model_parallel_size = 1, None
    if args.hybrid_layer_pattern is not None:
        alone.hybrid_layer_pattern = layers_of(args.hybrid_layer_pattern)
    return alone


def has(args: argparse.Namespace, letter: str) -> bool:
    """Whether a run's model is a HybridModel with layers of one kind."""
    return args.hybrid_layer_pattern is not None and letter in args.hybrid_layer_pattern


def mamba_heads(args: argparse.Namespace) -> int:
    """Heads of a Mamba layer: without --mamba-num-heads its inner size is twice the hidden size, as in Megatron."""
    return args.mamba_num_heads or 2 * (args.hidden_size or 0) // args.mamba_head_dim


def continues_gpt(pattern: str | None, saved: Mapping[str, Any]) -> bool:
    """Whether a pattern is the model of a saved GPT: attention and a block in turn, the same number of times.

    Megatron reads such a checkpoint into the HybridModel, unless it has latents.
    """
    block = Symbols.MLP if saved.get("num_experts") is None else Symbols.MOE
    gpt = saved.get("hybrid_layer_pattern") is None and saved.get("experimental_attention_variant") is None
    return gpt and pattern is not None and layers_of(pattern) == (Symbols.ATTENTION + block) * saved["num_layers"]


def complete(args: argparse.Namespace, stages: int) -> None:
    """Set the number of layers and the kind of attention from the pattern, as Megatron does, and cut a pattern without
    stages evenly.

    Args:
        args: parsed arguments with a pattern.
        stages: of the pipeline, virtual ones included.
    """
    pattern = args.hybrid_layer_pattern
    args.num_layers = len(layers_of(pattern))
    args.multi_latent_attention |= Symbols.MLA in pattern
    size, rest = divmod(args.num_layers, max(stages, 1))
    uneven = args.decoder_first_pipeline_num_layers or args.decoder_last_pipeline_num_layers
    if Symbols.PIPE not in pattern and size and not rest and not uneven:
        args.hybrid_layer_pattern = Symbols.PIPE.join(map("".join, batched(pattern, size)))


class Builder(HybridModelBuilder):
    """Megatron's builder, which chooses the modules of the layers when it builds the model, as that of a GPT does.

    So checks and plans of arguments need no Transformer Engine.
    """

    def build_model(self, *args: Any, **kwargs: Any) -> Any:
        self._model_config.hybrid_stack_spec = stack_spec(self._model_config.transformer)
        return super().build_model(*args, **kwargs)


def default_class(args: argparse.Namespace) -> str:
    """The value of `--model-class` where it is not given."""
    return "gpt" if args.hybrid_layer_pattern is None and beyond_hybrid(args) else "hybrid"


def model_config(args: argparse.Namespace) -> Any:
    """Megatron's HybridModelConfig for checked arguments of a HybridModel or of a GPT.

    That of a GPT has the names of the GPT: two of its layers are one of the GPT's (`mcore.model.layers_of_gpt_layer`).
    """
    from_gpt = args.hybrid_layer_pattern is None
    config = hybrid_config_from_args(_with_pattern(args) if from_gpt else args)
    config.transformer.layers_of_gpt_layer = 2 if from_gpt else 1
    config.builder = f"{__name__}.{Builder.__name__}"
    return config


def letters_of(args: argparse.Namespace) -> list[str]:
    """The letter of each layer of a pattern, or the two letters of each layer of a GPT."""
    if args.hybrid_layer_pattern is not None:
        return list(layers_of(args.hybrid_layer_pattern))
    mixers = Symbols.MLA if args.multi_latent_attention else Symbols.ATTENTION, Symbols.GDN
    linear = linear_attention_pattern(args)
    experts = get_moe_layer_pattern(args) if args.num_experts is not None else [0] * args.num_layers
    return [mixers[mixer] + BLOCKS[block] for mixer, block in zip(linear, experts, strict=True)]


def _with_pattern(args: argparse.Namespace) -> argparse.Namespace:
    """Checked arguments of a GPT -> those of the HybridModel with the same layers on the same stages."""
    letters = letters_of(args)
    stages = chain.from_iterable(zip(*layers_by_chunk(args), strict=True))  # in the order of the layers
    changed = argparse.Namespace(**vars(args) | NO_SPLIT)
    changed.hybrid_layer_pattern = Symbols.PIPE.join("".join(letters[layer] for layer in stage) for stage in stages)
    changed.num_layers *= 2
    if args.recompute_num_layers is not None:
        changed.recompute_num_layers *= 2
    changed.experimental_attention_variant = None
    return changed


def beyond_hybrid(args: argparse.Namespace) -> list[str]:
    """Given options that HybridModel lacks."""
    return [f"--{name.replace('_', '-')}" for name in BEYOND_HYBRID if getattr(args, name)]


def problems(args: argparse.Namespace) -> Iterator[str]:
    """Problems with `--model-class`, and with `--hybrid-layer-pattern`, with the position in the pattern (from 0)."""
    pattern = args.hybrid_layer_pattern
    if pattern is None:
        if args.model_class == "hybrid" and (given := beyond_hybrid(args)):
            yield f"--model-class hybrid with {', '.join(given)}: only GPTModel has it. Leave one of them out."
        return
    if args.model_class == "gpt":
        yield f"--model-class gpt with --hybrid-layer-pattern {pattern}: a pattern is a HybridModel. Leave one out."
    option = f"--hybrid-layer-pattern {pattern}"
    known = ", ".join(f"{letter} {name}" for letter, name in LETTERS.items())
    for position, letter in enumerate(pattern):
        if letter not in LETTERS and letter != Symbols.PIPE:
            yield f"{option}: {letter!r} at position {position} is not a layer that is supported here. Use {known}, |."
    if args.multi_latent_attention and Symbols.ATTENTION in pattern:
        yield f"{option} with --multi-latent-attention: * is attention without latents. Write + in its place."
    stages = pattern.split(Symbols.PIPE)
    for number, stage in enumerate(stages[1:-1], start=1):  # embedding and head can be stages of their own
        if not stage:
            yield f"{option}: stage {number} (from 0) has no layer. Give it one, or use fewer stages."
    if Symbols.MOE in pattern and args.num_experts is None:
        position = pattern.index(Symbols.MOE)
        yield f"{option}: E at position {position} needs --num-experts, --moe-ffn-hidden-size and --moe-router-topk."
    if Symbols.MOE not in pattern and args.num_experts is not None:
        yield f"--num-experts {args.num_experts}: {option} has no E. Add one, or leave --num-experts out."
    if Symbols.MAMBA in pattern and (heads := mamba_heads(args)) % args.mamba_num_groups:
        yield f"{heads} Mamba heads cannot be divided among --mamba-num-groups {args.mamba_num_groups}. Change one."
    if Symbols.MAMBA in pattern and args.reset_attention_mask:
        yield f"{option} with --reset-attention-mask: Mamba layers carry their state across documents. Leave it out."
