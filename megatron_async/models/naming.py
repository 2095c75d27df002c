# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Parameter names that do not depend on how the model is split."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from megatron_async.mcore.model import layers_of_gpt_layer

# The first and the last stage hold this weight when it is tied.
_TIED_NAME = "embedding.word_embeddings.weight"


def layer_number(module: Any) -> int:
    """Number, from 1, of a layer, or of the layer of a router, as users know it.

    A HybridModel that is built from the arguments of a GPT has two layers for each layer of the GPT: the first with
    its attention, the second with its feed-forward block.
    """
    return 1 + (module.layer_number - 1) // layers_of_gpt_layer(module.config)


def global_names(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters of an unwrapped model chunk with their names in the whole model, see `global_name`; both copies of a
    tied embedding have one name."""
    rename = global_name(chunk)
    for name, param in chunk.named_parameters():
        yield _TIED_NAME if getattr(param, "shared_embedding", False) else rename(name), param


def global_name(chunk: torch.nn.Module) -> Callable[[str], str]:
    """Name in a model chunk -> name in the whole model: layers and experts are numbered through the model.

    A HybridModel that is built from the arguments of a GPT has the names of the GPT.
    """
    numbers = {
        name: f"{match[1]}.{layer_number(module) - 1}"
        for name, module in chunk.named_modules()
        if (match := re.fullmatch(r"(.*\.layers)\.\d+", name)) and hasattr(module, "layer_number")
    }
    first_experts = {
        name: module.local_expert_indices[0]
        for name, module in chunk.named_modules()
        if hasattr(module, "local_expert_indices")
    }

    def rename(name: str) -> str:
        name = _with_global_expert(name, first_experts)
        match = re.match(r"(.*?\.layers\.\d+)(\..*)", name)
        return numbers.get(match[1], match[1]) + match[2] if match else name

    return rename


def _with_global_expert(name: str, first_experts: Mapping[str, int]) -> str:
    """Replace the number of a local expert: of a module or, with grouped weights, of the weight itself."""
    match = re.fullmatch(r"(.*)(\.experts\.local_experts\.|\.experts\.linear_fc[12]\.weight)(\d+)(.*)", name)
    if match is None or match[1] not in first_experts:
        return name
    return f"{match[1]}{match[2]}{first_experts[match[1]] + int(match[3])}{match[4]}"


def ungrouped(name: str) -> str:
    """The name of a weight of grouped experts if each expert were a module of its own, as with local layers; any other
    name as it is."""
    return re.sub(r"\.experts\.(linear_fc[12])\.weight(\d+)$", r".experts.local_experts.\2.\1.weight", name)


def layer_of(name: str, layers: int) -> int:
    """The layer, from 0, that a parameter of the whole model belongs to: the input embedding to the first, the final
    norm and the head to the last.

    Raises:
        ValueError: an unknown name.
    """
    if match := re.search(r"decoder\.layers\.(\d+)\.", name):
        return int(match[1])
    if name.startswith("embedding."):
        return 0
    if name.startswith(("decoder.final_layernorm.", "decoder.final_norm.", "output_layer.")):
        return layers - 1
    raise ValueError(f"parameter {name}: not known where in the model it belongs")
