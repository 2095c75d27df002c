# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Parameter names that do not depend on how the model is split."""

import re
from collections.abc import Iterator, Mapping

import torch

# The first and the last stage hold this weight when it is tied.
_TIED_NAME = "embedding.word_embeddings.weight"


def global_names(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters of an unwrapped model chunk with their names in the whole model: layers and experts are numbered
    through the model, and both copies of a tied embedding have one name."""
    offsets = {}
    for name, module in chunk.named_modules():
        match = re.fullmatch(r"(.*\.layers)\.(\d+)", name)
        if match and hasattr(module, "layer_number"):
            offsets[match[1]] = module.layer_number - 1 - int(match[2])
    first_experts = {
        name: module.local_expert_indices[0]
        for name, module in chunk.named_modules()
        if hasattr(module, "local_expert_indices")
    }
    for name, param in chunk.named_parameters():
        name = _with_global_expert(name, first_experts)
        match = re.match(r"(.*?\.layers)\.(\d+)(\..*)", name)
        if getattr(param, "shared_embedding", False):
            yield _TIED_NAME, param
        elif match:
            yield f"{match[1]}.{int(match[2]) + offsets.get(match[1], 0)}{match[3]}", param
        else:
            yield name, param


def _with_global_expert(name: str, first_experts: Mapping[str, int]) -> str:
    """Replace the number of a local expert: of a module or, with grouped weights, of the weight itself."""
    match = re.fullmatch(r"(.*)(\.experts\.local_experts\.|\.experts\.linear_fc[12]\.weight)(\d+)(.*)", name)
    if match is None or match[1] not in first_experts:
        return name
    return f"{match[1]}{match[2]}{first_experts[match[1]] + int(match[3])}{match[4]}"


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
