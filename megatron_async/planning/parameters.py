# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Parameters of a run's model: counted from Megatron's own modules, built stage by stage without memory."""

import argparse
import math
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron_async.mcore.model import build_model, layers_by_chunk
from megatron_async.mcore.parallel import first_rank, tensor_shards
from megatron_async.mcore.patches import temporary
from megatron_async.models import gpt, hybrid
from megatron_async.models.naming import global_names
from megatron_async.optim import options
from megatron_async.optim.layout import Layout
from megatron_async.optim.param_groups import KINDS, MATRIX_ROLES, classify, layouts

SUBLAYERS = ("attention", "linear_attention", "mamba", "feed_forward", "experts")
"""Kinds of parameters that tell the sublayers of a layer: mixers and blocks."""

_BEYOND_LOCAL = ("persist_layer_norm", "layernorm_zero_centered_gamma", "sequence_parallel", "moe_permute_fusion")
"""Settings of a TransformerConfig that change no parameter: torch's LayerNorm refuses three, the last wants a GPU."""

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter as one rank of a stage holds it.

    Attributes:
        name: in the whole model.
        role: its parameter group.
        kind: part of the model, one of KINDS.
        shape: of this rank's part.
        copies: ranks that hold other parts of it or, for an expert, other experts.
        duplicate: whether it is the second copy of a tied embedding.
        number: parameters of this shape on this rank: its experts of a layer.
        matrices: shapes of the whole matrices that a matrix optimizer would step on.
        cut: ranks over which each of them is cut, and gathered for the step.
    """

    name: str
    role: str
    kind: str
    shape: tuple[int, ...]
    copies: int
    duplicate: bool = False
    number: int = 1
    matrices: tuple[tuple[int, int], ...] = ()
    cut: int = 1

    @property
    def local(self) -> int:
        return self.number * math.prod(self.shape)

    @property
    def whole(self) -> int:
        return 0 if self.duplicate else self.local * self.copies

    @property
    def is_expert(self) -> bool:
        return self.kind == "experts"


@dataclass(frozen=True)
class Block:
    """The smallest part of a model that a stage holds whole: embedding, a layer, or final norm with head."""

    parameters: tuple[Parameter, ...]

    @cached_property
    def alike(self) -> Hashable:
        """Equal for blocks whose parameters differ in their names alone."""
        return tuple((own.role, own.kind, own.shape, own.number, own.matrices, own.cut) for own in self.parameters)

    def has(self, kind: str) -> bool:
        """Whether a parameter is of this kind, one of KINDS."""
        return kind in self._kinds

    @cached_property
    def numbers(self) -> tuple[int, int]:
        """Of parameters on this rank: without experts, and of experts."""
        experts = sum(own.local for own in self.parameters if own.is_expert)
        return sum(own.local for own in self.parameters) - experts, experts

    @cached_property
    def _kinds(self) -> frozenset[str]:
        return frozenset(own.kind for own in self.parameters)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A model chunk (virtual stage) of a rank; layers are numbered from 0."""

    layers: tuple[int, ...]
    parameters: tuple[Parameter, ...]

    @classmethod
    def of(cls, model: Sequence[Block], numbers: Iterable[int]) -> "Chunk":
        """The chunk of some blocks of a model, given by their numbers in its row."""
        own = tuple(numbers)
        layers = tuple(number - 1 for number in own if 0 < number < len(model) - 1)
        return cls(layers, tuple(parameter for number in own for parameter in model[number].parameters))


@dataclass(frozen=True, slots=True)
class Stage:
    """The chunks of each rank of a pipeline stage."""

    chunks: tuple[Chunk, ...]

    @property
    def layers(self) -> list[int]:
        return [layer for chunk in self.chunks for layer in chunk.layers]

    @property
    def parameters(self) -> list[Parameter]:
        return [parameter for chunk in self.chunks for parameter in chunk.parameters]


def count_by_kind(parameters: Iterable[Parameter]) -> dict[str, int]:
    """Sizes in the whole model by kind, in the order of KINDS; kinds that do not occur are left out."""
    counts: Counter[str] = Counter()
    for parameter in parameters:
        counts[parameter.kind] += parameter.whole
    return {kind: counts[kind] for kind in KINDS if counts[kind]}


def active(by_kind: dict[str, int], experts: int | None, chosen: int) -> int:
    """Parameters that take part in one token: all but the experts that it is not sent to."""
    idle = 0 if experts is None else by_kind.get("experts", 0) * (experts - chosen) // experts
    return sum(by_kind.values()) - idle


def blocks(args: argparse.Namespace) -> list[Block]:
    """The model of checked arguments, built on the meta device: embedding, every layer, and final norm with head.

    Must not be called where torch.distributed is in use.
    """
    alone = hybrid.on_one_stage(args)
    experts = args.num_experts or 1
    alone.expert_model_parallel_size = experts  # one expert a rank, so that few modules are built
    tensor = args.tensor_model_parallel_size
    alone.world_size = math.lcm(tensor, experts * (args.expert_tensor_parallel_size or 1))
    on_meta = temporary.CURRENT_DEVICE.replaced(lambda original: lambda: torch.device("meta"))  # without memory
    with first_rank(alone), on_meta:
        config = gpt.model_config(alone)
        config.transformer.transformer_impl = "local"  # the same parameters, and no GPU needed
        config.transformer.gradient_accumulation_fusion = False  # needs Apex, and no gradient is computed
        config.transformer.perform_initialization = False
        for setting in _BEYOND_LOCAL:
            setattr(config.transformer, setting, False)
        if args.multi_latent_attention and args.q_lora_rank is None:
            config.transformer.qk_layernorm = False  # local layers have no norm of queries without a latent
        if config.position_embedding_type != "learned_absolute":  # others have no parameters, and are slow to make
            config.position_embedding_type = "none"
        model = build_model(config, ProcessGroupCollection.use_mpu_process_groups(), None)
        whole = _layouts(args, model)
        found: list[list[Parameter]] = [[] for _ in range(args.num_layers + 2)]
        for name, param in global_names(model):
            match = _LAYER.match(name)
            place = int(match[1]) + 1 if match else 0 if name.startswith("embedding.") else -1
            shards = tensor_shards(param)
            copies = 1 if shards is None else shards[0].size()
            role, kind = classify(name, param)
            copies *= experts if kind == "experts" else 1
            shape, layout = tuple(param.shape), whole.get(param)
            matrices = () if layout is None else layout.shapes(shape)
            cut = 1 if layout is None else layout.ranks
            found[place].append(Parameter(name, role, kind, shape, copies, matrices=matrices, cut=cut))
    return distributed([Block(tuple(parameters)) for parameters in found], experts, args.expert_model_parallel_size)


def _layouts(args: argparse.Namespace, model: torch.nn.Module) -> dict[torch.nn.Parameter, Layout]:
    """The matrices in each parameter for a matrix optimizer of this run."""
    found = layouts(model, get_model_config(model), tensor_shards, MATRIX_ROLES, **options.splits(args))
    return {param: layout for _, param, layout in found}


def distributed(model: Sequence[Block], experts: int, ranks: int) -> list[Block]:
    """The blocks with each layer's experts over so many expert-parallel ranks."""

    def on_rank(parameter: Parameter) -> Parameter:
        if not parameter.is_expert:
            return parameter
        parts = parameter.copies * parameter.number // experts
        return replace(parameter, copies=parts * ranks, number=experts // ranks)

    return [Block(tuple(map(on_rank, block.parameters))) for block in model]


def on_stages(args: argparse.Namespace, model: Sequence[Block]) -> list[Block]:
    """The blocks as a pipeline holds them: its last stage has a copy of a tied embedding."""
    if args.pipeline_model_parallel_size == 1 or args.untie_embeddings_and_output_weights:
        return list(model)
    tied = (replace(own, duplicate=True) for own in model[0].parameters if "word_embeddings" in own.name)
    return [*model[:-1], Block((*model[-1].parameters, *tied))]


def stages(args: argparse.Namespace, model: Sequence[Block] | None = None) -> list[Stage]:
    """The stages of the split that the arguments give; `model` saves building `blocks` again."""
    built = on_stages(args, blocks(args) if model is None else model)
    return [Stage(tuple(Chunk.of(built, numbers) for numbers in chunks)) for chunks in numbers_by_chunk(args)]


def numbers_by_chunk(args: argparse.Namespace) -> list[list[list[int]]]:
    """Numbers of the blocks on each chunk of each stage, in the split that the arguments give."""
    found = [[[layer + 1 for layer in chunk] for chunk in chunks] for chunks in layers_by_chunk(args)]
    found[0][0].insert(0, 0)
    found[-1][-1].append(args.num_layers + 1)
    return found
