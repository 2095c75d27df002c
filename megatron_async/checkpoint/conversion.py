# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a GPT and of the HybridModel whose pattern has its layers, one into the other, with all they hold.

A GPT names a layer once, `decoder.layers.3.`, or, where its layers are all alike, gives every tensor an axis of layers
and no number. A HybridModel with a pattern names the two halves of the layer, `decoder.layers.6.` and `.7.`. Prefixes
for optimizer state and older weight versions stay.
"""

import argparse
import dataclasses
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols

from megatron_async.checkpoint import folder, manifest
from megatron_async.checkpoint.manifest import json_value
from megatron_async.files import write_atomically
from megatron_async.mcore import checkpoint as distributed
from megatron_async.mcore.checkpoint import Contents, Place
from megatron_async.mcore.parallel import alone
from megatron_async.models import hybrid, one_process

# Name of a tensor or object in a layer. Optimizer state of another shape than its weight is an object that ends in its
# place in the weight (`_state_of_any_shape` of mcore/patches/megatron.py).
_IN_LAYER = re.compile(r"(.*?decoder\.layers\.)(?:(\d+)\.)?([a-z].*?)(?:\.([\d_]+)_of_([\d_]+))?")
_NORMS = ("decoder.final_layernorm.", "decoder.final_norm.")
_SECOND = ("mlp.", "pre_mlp_layernorm.")
"""Beginnings of names in the second half of a layer."""
_EMPTY = Place("output_layer._extra_state", (1,), (0,))
"""What a HybridModel saves and a GPT does not."""
_NO_SPLIT = {**hybrid.NO_SPLIT, "virtual_pipeline_model_parallel_size": None}


def convert(source: Path, root: Path, *, to_gpt: bool) -> argparse.Namespace:
    """Write the checkpoint `source` into the folder `root`; return its arguments.

    Raises:
        ValueError: the model has no counterpart, an optimizer's state has no names, `root` holds checkpoints.
    """
    if folder.checkpoints(root) or folder.pointer(root):
        raise ValueError(f"--save {root}: holds checkpoints already; give a new folder.")
    before = distributed.arguments_of(source)
    changes = gpt_arguments(before) if to_gpt else hybrid_arguments(before)
    after = argparse.Namespace(**vars(before) | changes)
    with alone(one_process.arguments_of(source)):
        contents = distributed.read(source)
        if unnamed := next((name for name in contents.tensors if name.startswith("optimizer.distributed.")), None):
            raise ValueError(
                f"--load {source}: {unnamed} is a buffer without names of parameters. Save once more with "
                "--dist-ckpt-optim-fully-reshardable."
            )
        made = _to_gpt(contents, after) if to_gpt else _to_hybrid(contents)
        made.common["args"] = after
        place = root / folder.STAGING / source.name
        shutil.rmtree(place.parent, ignore_errors=True)  # of a conversion that was killed
        place.mkdir(parents=True)
        distributed.write(made, place)
    _publish(source, root, {name: json_value(value) for name, value in changes.items()})
    return after


def gpt_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments that change where a HybridModel becomes a GPT; ValueError where there is none."""
    if args.hybrid_layer_pattern is None:
        raise ValueError("the checkpoint is a GPT's already")
    pattern = hybrid.layers_of(args.hybrid_layer_pattern)
    wrong = (at for at, letter in enumerate(pattern) if letter not in (hybrid.MIXERS, hybrid.BLOCKS)[at % 2])
    if (at := next(wrong, None)) is not None or len(pattern) % 2:
        end = "it ends" if at is None else f"{pattern[at]!r}"
        raise ValueError(
            f"--hybrid-layer-pattern {pattern}: {end} at position {len(pattern) if at is None else at}. A GPT has "
            "attention (* or +) or Gated DeltaNet (G) and a feed-forward block (-) or experts (E) in turn."
        )
    linear = [int(letter == Symbols.GDN) for letter in pattern[::2]]
    experts = [hybrid.BLOCKS.index(letter) for letter in pattern[1::2]]
    numbers = range(1, len(linear) + 1)
    every = next((n for n in numbers[1:] if linear == [int(number % n > 0) for number in numbers]), None)
    return _NO_SPLIT | {
        "hybrid_layer_pattern": None,
        "num_layers": len(linear),
        "encoder_num_layers": len(linear),
        "moe_layer_freq": experts if len(set(experts)) > 1 else 1,
        "experimental_attention_variant": "gated_delta_net" if any(linear) else None,
        "linear_attention_freq": (every or linear) if any(linear) else None,
    }


def hybrid_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments that change where a GPT becomes a HybridModel with a pattern; ValueError where it cannot."""
    if args.hybrid_layer_pattern is not None:
        raise ValueError("the checkpoint is a HybridModel's already")
    if lacking := hybrid.beyond_hybrid(args):
        raise ValueError(f"HybridModel lacks what this model has: {', '.join(lacking)}")
    pattern = "".join(hybrid.letters_of(args))
    return _NO_SPLIT | {
        "hybrid_layer_pattern": pattern,
        "num_layers": len(pattern),
        "encoder_num_layers": len(pattern),
        "moe_layer_freq": 1,
        "experimental_attention_variant": None,
        "linear_attention_freq": None,
        "model_class": "hybrid",
    }


def _to_hybrid(contents: Contents) -> Contents:
    contents = _numbered(_unstacked(contents), _NORMS, lambda layer, name: 2 * layer + name.startswith(_SECOND))
    return contents._replace(objects=contents.objects | {_EMPTY: None})


def _to_gpt(contents: Contents, args: argparse.Namespace) -> Contents:
    contents = _numbered(contents, _NORMS[::-1], lambda layer, name: layer // 2)
    contents.objects.pop(_EMPTY, None)
    alike = args.moe_layer_freq == 1 and args.linear_attention_freq is None
    return _stacked(contents, args.num_layers) if alike else contents


def _numbered(contents: Contents, norms: tuple[str, str], number: Callable[[int, str], int]) -> Contents:
    """Other names: of the final norm, and of the layers, whose number and name in the layer give the new number."""

    def renamed(name: str) -> str:
        match = _IN_LAYER.fullmatch(name)
        if match is None:
            return name.replace(*norms)
        return f"{match[1]}{number(int(match[2]), match[3])}{name[match.end(2) :]}"

    tensors = {renamed(name): tensor for name, tensor in contents.tensors.items()}
    objects = {place._replace(name=renamed(place.name)): value for place, value in contents.objects.items()}
    return Contents(tensors, objects, contents.common)


def _unstacked(contents: Contents) -> Contents:
    """Tensors and objects of all layers, cut into those of one layer each."""
    tensors, objects = dict(contents.tensors), dict(contents.objects)
    for name, tensor in contents.tensors.items():
        match = _IN_LAYER.fullmatch(name)
        if match is not None and match[2] is None:
            del tensors[name]
            tensors |= {f"{match[1]}{layer}.{match[3]}": own.clone() for layer, own in enumerate(tensor)}
    for place, value in contents.objects.items():
        match = _IN_LAYER.fullmatch(place.name)
        if match is None or match[2] is not None:
            continue
        del objects[place]
        if match[4] is None:
            name, at = f"{match[1]}{place.at[0]}.{match[3]}", place.at[1:] or (0,)
            objects[Place(name, place.shape[1:] or (1,), at)] = value
        else:
            (layer, _, rest), (_, _, of) = match[4].partition("_"), match[5].partition("_")
            objects[place._replace(name=f"{match[1]}{layer}.{match[3]}.{rest}_of_{of}")] = value
    return Contents(tensors, objects, contents.common)


def _stacked(contents: Contents, layers: int) -> Contents:
    """The other way: every tensor gets an axis of layers, every object a place on it."""
    tensors, objects = dict(contents.tensors), dict(contents.objects)
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for name in contents.tensors:
        if match := _IN_LAYER.fullmatch(name):
            stacks.setdefault(f"{match[1]}{match[3]}", {})[int(match[2])] = tensors.pop(name)
    tensors |= {name: torch.stack([own[layer] for layer in range(layers)]) for name, own in stacks.items()}
    for place, value in contents.objects.items():
        if (match := _IN_LAYER.fullmatch(place.name)) is None:
            continue
        del objects[place]
        name, layer = f"{match[1]}{match[3]}", int(match[2])
        if match[4] is not None:
            objects[place._replace(name=f"{name}.{layer}_{match[4]}_of_{layers}_{match[5]}")] = value
        elif (place.shape, place.at) == ((1,), (0,)):
            objects[Place(name, (layers,), (layer,))] = value
        else:
            objects[Place(name, (layers, *place.shape), (layer, *place.at))] = value
    return Contents(tensors, objects, contents.common)


def _publish(source: Path, root: Path, changes: dict[str, Any]) -> None:
    """Complete a written checkpoint as its source is: with a manifest if that has one, else as Megatron does."""
    place = root / folder.STAGING / source.name
    found = folder.judge(source)
    if found.manifest is not None:
        files = manifest.measure(place, manifest.file_names(place), sync=True)
        arguments = {**found.manifest.arguments, **changes}
        manifest.write(place, dataclasses.replace(found.manifest, files=files, arguments=arguments))
    if source.name == folder.name_of(found.iteration):
        folder.publish(root, found.iteration)
        return
    place.rename(root / folder.RELEASE)
    place.parent.rmdir()
    write_atomically(root / folder.TRACKER, folder.RELEASE)
