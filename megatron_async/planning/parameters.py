# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Parameters of a run's model: counted from Megatron's own modules, built stage by stage without memory."""

import argparse
import gc
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_async.mcore.model import build_model, on_meta_device
from megatron_async.mcore.parallel import pretend_rank, tensor_parallel_place
from megatron_async.models import gpt
from megatron_async.models.naming import global_names
from megatron_async.optim.param_groups import KINDS, classify


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
    """

    name: str
    role: str
    kind: str
    shape: tuple[int, ...]
    copies: int
    duplicate: bool

    @property
    def local(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def whole(self) -> int:
        return 0 if self.duplicate else self.local * self.copies

    @property
    def is_expert(self) -> bool:
        return self.kind == "experts"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A model chunk (virtual stage) of a rank; layers are numbered from 0."""

    layers: tuple[int, ...]
    parameters: tuple[Parameter, ...]


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


def stages(args: argparse.Namespace) -> list[Stage]:
    """Build every stage of the model of checked arguments on the meta device; nothing is allocated or started.

    Must not be called where torch.distributed is in use.
    """
    return [_stage(args, stage) for stage in range(args.pipeline_model_parallel_size)]


def _stage(args: argparse.Namespace, stage: int) -> Stage:
    with _first_rank_of(args, stage):
        config = gpt.model_config(args)
        config.transformer.transformer_impl = "local"  # the same parameters, and no GPU needed
        config.transformer.perform_initialization = False
        groups = ProcessGroupCollection.use_mpu_process_groups()
        virtual = args.virtual_pipeline_model_parallel_size
        return Stage(tuple(_chunk(config, groups, chunk) for chunk in ([None] if virtual is None else range(virtual))))


def _chunk(config: Any, groups: ProcessGroupCollection, vp_stage: int | None) -> Chunk:
    model: Any = build_model(config, groups, vp_stage)
    parameters = []
    for name, param in global_names(model):
        role, kind = classify(name, param)
        copies = tensor_parallel_place(param)[0] if getattr(param, "tensor_model_parallel", False) else 1
        if kind == "experts":
            copies *= config.transformer.expert_model_parallel_size
        duplicate = bool(getattr(param, "shared_embedding", False) and model.post_process and not model.pre_process)
        parameters.append(Parameter(name, role, kind, tuple(param.shape), copies, duplicate))
    return Chunk(tuple(layer.layer_number - 1 for layer in model.decoder.layers), tuple(parameters))


@contextmanager
def _first_rank_of(args: argparse.Namespace, stage: int) -> Iterator[None]:
    """Process groups of the first rank of a stage without the other processes, and parameters without memory."""
    pretend_rank(args, stage * (args.world_size // args.pipeline_model_parallel_size))
    collecting = gc.isenabled()
    gc.disable()  # hundreds of thousands of new objects, none of them garbage: half the time would go there
    try:
        with on_meta_device():
            yield
    finally:
        mpu.destroy_model_parallel()
        dist.destroy_process_group()
        if collecting:
            gc.enable()
