# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Names of parameters that do not depend on how the model is split."""

import re
from collections.abc import Iterator

import torch

# Both ends of the pipeline hold this weight when it is tied.
_TIED_NAME = "embedding.word_embeddings.weight"


def global_names(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters of a model chunk, unwrapped, with the names they have in the whole model: layers are numbered from
    the first one of the model, and the two copies of a tied embedding have the same name."""
    offsets = {}
    for name, module in chunk.named_modules():
        match = re.fullmatch(r"(.*\.layers)\.(\d+)", name)
        if match and hasattr(module, "layer_number"):
            offsets[match[1]] = module.layer_number - 1 - int(match[2])
    for name, param in chunk.named_parameters():
        match = re.match(r"(.*?\.layers)\.(\d+)(\..*)", name)
        if getattr(param, "shared_embedding", False):
            yield _TIED_NAME, param
        elif match:
            yield f"{match[1]}.{int(match[2]) + offsets.get(match[1], 0)}{match[3]}", param
        else:
            yield name, param


def layer_of(name: str, layers: int) -> int:
    """The layer, from 0, beside which a parameter of the whole model lives: the first one for the input embedding, the
    last one for the final norm and the head.

    Raises:
        ValueError: a name of none of these.
    """
    if match := re.search(r"decoder\.layers\.(\d+)\.", name):
        return int(match[1])
    if name.startswith("embedding."):
        return 0
    if name.startswith(("decoder.final_layernorm.", "decoder.final_norm.", "output_layer.")):
        return layers - 1
    raise ValueError(f"parameter {name}: not known where in the model it belongs")
