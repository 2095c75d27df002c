# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Parameters of a run's model: counted from Megatron's own modules, built stage by stage without memory."""

import argparse
import gc
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_async.mcore.model import build_gpt, layers_of_stage, on_meta_device
from megatron_async.mcore.parallel import pretend_rank, tensor_parallel_place
from megatron_async.mcore.training import GPTModelConfig
from megatron_async.models import gpt
from megatron_async.models.naming import global_names

KINDS = (
    "embedding",
    "attention",
    "linear_attention",
    "feed_forward",
    "router",
    "experts",
    "shared_expert",
    "norm",
    "head",
)

# The first match decides.
_PATTERNS = (
    (r"^embedding\.", "embedding"),
    (r"layernorm|layer_norm|\.out_norm\.|final_norm", "norm"),
    (r"^output_layer\.", "head"),
    (r"\.mlp\.router\.", "router"),
    (r"\.mlp\.shared_experts\.", "shared_expert"),
    (r"\.mlp\.experts\.", "experts"),
    (r"\.mlp\.", "feed_forward"),
    (r"\.self_attention\.(in_proj|out_proj|conv1d|A_log|dt_bias)", "linear_attention"),
    (r"\.self_attention\.", "attention"),
)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter as one rank of a stage holds it.

    Attributes:
        name: in the whole model.
        kind: one of KINDS.
        shape: of this rank's part.
        copies: how often its size counts in the whole model: tensor ranks that hold parts, times expert ranks that
            hold other experts.
        duplicate: whether the stage holds it as a second copy (head of a model with tied embeddings).
    """

    name: str
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

    @property
    def is_matrix(self) -> bool:
        """Whether optimizers for matrices step on it: hidden 2-D weights."""
        return len(self.shape) == 2 and self.kind not in ("embedding", "head", "norm")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A model chunk (virtual stage) of a rank.

    Attributes:
        layers: numbers of its layers, from 0.
        parameters: what a rank holds of it.
    """

    layers: tuple[int, ...]
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True, slots=True)
class Stage:
    """What each rank of a pipeline stage holds: one chunk, or several virtual stages."""

    chunks: tuple[Chunk, ...]

    @property
    def layers(self) -> list[int]:
        return [layer for chunk in self.chunks for layer in chunk.layers]

    @property
    def parameters(self) -> list[Parameter]:
        return [parameter for chunk in self.chunks for parameter in chunk.parameters]


def kind_of(name: str) -> str:
    """The kind of a parameter, by its name in the whole model.

    Raises:
        ValueError: a name that fits no kind.
    """
    for pattern, kind in _PATTERNS:
        if re.search(pattern, name):
            return kind
    raise ValueError(f"parameter {name}: of no known kind ({', '.join(KINDS)})")


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
    with _pretended_rank(args, stage), _no_memory():
        config = gpt.model_config(args)
        config.transformer.transformer_impl = "local"  # the same parameters, and no GPU needed
        config.transformer.perform_initialization = False
        groups = ProcessGroupCollection.use_mpu_process_groups()
        virtual = args.virtual_pipeline_model_parallel_size
        return Stage(tuple(_chunk(config, groups, chunk) for chunk in ([None] if virtual is None else range(virtual))))


def _chunk(config: GPTModelConfig, groups: ProcessGroupCollection, vp_stage: int | None) -> Chunk:
    model = build_gpt(config, groups, vp_stage)
    parameters = []
    for name, param in global_names(model):
        kind = kind_of(name)
        parts, _ = tensor_parallel_place(param)
        copies = parts if getattr(param, "tensor_model_parallel", False) else 1
        if kind == "experts":
            copies *= config.transformer.expert_model_parallel_size
        duplicate = bool(getattr(param, "shared_embedding", False) and model.post_process and not model.pre_process)
        parameters.append(Parameter(name, kind, tuple(param.shape), copies, duplicate))
    return Chunk(tuple(layers_of_stage(config.transformer, vp_stage)), tuple(parameters))


@contextmanager
def _pretended_rank(args: argparse.Namespace, stage: int) -> Iterator[None]:
    """Process groups of the first rank of a stage, without the other processes."""
    pretend_rank(args, stage * (args.world_size // args.pipeline_model_parallel_size))
    try:
        yield
    finally:
        mpu.destroy_model_parallel()
        dist.destroy_process_group()


@contextmanager
def _no_memory() -> Iterator[None]:
    """Build modules without allocating their parameters."""
    collecting = gc.isenabled()
    gc.disable()  # hundreds of thousands of new objects, none of them garbage: half the time would go there
    try:
        with on_meta_device():
            yield
    finally:
        if collecting:
            gc.enable()
