# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Megatron's set-up of model, optimizer and scheduler, with optimizers that Megatron does not have."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.optimizer.emerging_optimizers import _EMERGING_OPTIMIZERS, EmergingOptimizerEntry
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)
from megatron.core.optimizer.optimizer_config import OptimizerConfig, ParamKey, ParamWithNamePredicate
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import training
from megatron.training.global_vars import get_args

from megatron_async.mcore.arguments import overridden
from megatron_async.mcore.patches import temporary

_MEGATRONS = ("adam", "sgd")


@dataclass(frozen=True, slots=True)
class Optimizers:
    """The torch optimizers of a run.

    Attributes:
        names: optimizers in use, the one of `--optimizer` first.
        build: (name, parameter groups, model chunks) -> torch optimizer, for names other than "adam" and "sgd".
        optimizer_of: (parameter name, parameter) -> optimizer name.
    """

    names: Sequence[str]
    build: Callable[[str, list[dict[str, Any]], list[Any]], torch.optim.Optimizer]
    optimizer_of: Callable[[str, torch.Tensor], str]


def setup_model_and_optimizer(
    container: Any, optimizers: Optimizers, *, one_per_chunk: bool = False
) -> tuple[list[Any], MegatronOptimizer, Any]:
    """Build Megatron's model chunks, optimizer and learning-rate scheduler. Loads no checkpoint.

    Args:
        container: Megatron's configuration, as from `pretrain_cfg_container_from_args`.
        optimizers: the torch optimizers to build.
        one_per_chunk: build a separate optimizer for each model chunk, chained in the order of the chunks.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(overridden(get_args(), load=None, pretrained_checkpoint=None))
        if optimizers.names[0] not in _MEGATRONS:
            stack.enter_context(_registered(optimizers))
        if one_per_chunk:
            stack.enter_context(temporary.OPTIMIZER_OF_MODEL.replaced(_one_per_chunk))
        model, optimizer, scheduler = training.setup_model_and_optimizer(
            ModelType.encoder_or_decoder,
            cfg_container=container,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
    _complete_layer_wise(optimizer, container.optimizer)
    return model, optimizer, scheduler


@contextlib.contextmanager
def _registered(optimizers: Optimizers) -> Iterator[None]:
    """Let Megatron build several kinds of optimizers side by side.

    Megatron's registry takes one optimizer and sends the other parameters to Adam. Two changes are needed: the chosen
    optimizer is registered under a name of our own, because Megatron rewrites the table of parameters for "muon", and
    the function that builds the others builds ours too.
    """
    chosen, *others = optimizers.names
    alias = f"megatron_async-{chosen}"

    def key(name: str) -> ParamKey:
        def matches(param: torch.Tensor, full_name: str) -> bool:
            return optimizers.optimizer_of(full_name, param) == name

        return ParamKey(with_name_predicate=ParamWithNamePredicate(name, matches))

    def of_model(original: Callable[..., MegatronOptimizer]) -> Callable[..., MegatronOptimizer]:
        def build(config: OptimizerConfig, *args: Any, **kwargs: Any) -> MegatronOptimizer:
            config.optimizer = alias
            optimizer = original(config, *args, **kwargs)
            config.optimizer = chosen
            return optimizer

        return build

    def of_groups(original: Callable[..., Any]) -> Callable[..., Any]:
        def build(*, config: OptimizerConfig, model_chunks: list[Any], param_groups: list[Any], **kwargs: Any) -> Any:
            if config.optimizer in _MEGATRONS:
                return original(config=config, model_chunks=model_chunks, param_groups=param_groups, **kwargs)
            optimizer = optimizers.build(config.optimizer, param_groups, model_chunks)
            if kwargs.get("skip_megatron_wrapping"):
                return optimizer, _allocate_state
            return _wrapped(optimizer, config, kwargs["model_parallel_group"])

        return build

    _EMERGING_OPTIMIZERS[alias] = EmergingOptimizerEntry(
        optimizer_cls=lambda groups, model_chunks: optimizers.build(chosen, groups, model_chunks),
        init_state_fn=_allocate_state,
        config_to_kwargs=lambda config, model_chunks, groups: {"model_chunks": model_chunks},
        default_param_overrides={key(name): {"optimizer": name} for name in others},
    )
    try:
        with temporary.OPTIMIZER_OF_MODEL.replaced(of_model), temporary.OPTIMIZER_OF_GROUPS.replaced(of_groups):
            yield
    finally:
        del _EMERGING_OPTIMIZERS[alias]


def _wrapped(optimizer: torch.optim.Optimizer, config: OptimizerConfig, model_parallel_group: Any) -> MegatronOptimizer:
    """A torch optimizer in the Megatron optimizer of the run's precision."""
    if config.bf16:
        wrapped = Float16OptimizerWithFloat16Params(optimizer, config, None, _allocate_state)
    else:
        wrapped = FP32Optimizer(optimizer, config, _allocate_state)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    wrapped.grad_stats_parallel_group = model_parallel_group
    wrapped.tp_group, wrapped.expert_tp_group = groups.tp, groups.expt_tp
    return wrapped


def _allocate_state(optimizer: Any, config: Any = None) -> None:
    """Give every parameter its optimizer state without a step, so that a checkpoint can be loaded into it."""
    # Adam's step count is restored elsewhere. Transformer Engine's and Apex's Adam have no method for this.
    if isinstance(optimizer, torch.optim.Adam) or not hasattr(optimizer, "_init_group"):
        for group in optimizer.param_groups:
            for param in group["params"]:
                for name in ("exp_avg", "exp_avg_sq"):
                    optimizer.state[param].setdefault(name, torch.zeros_like(param))
    elif hasattr(optimizer, "init_states"):
        optimizer.init_states()
    else:
        for group in optimizer.param_groups:
            optimizer._init_group(group, skip_non_grad_params=False)


class _OptimizerPerChunk(ChainedOptimizer):
    """A chain of chunks' optimizers, each of which may be a chain itself."""

    def _synchronize_steps(self) -> None:
        """Do nothing: each chunk's chain synchronizes its own steps, and one chunk's update may be skipped."""


def _one_per_chunk(original: Callable[..., MegatronOptimizer]) -> Callable[..., MegatronOptimizer]:
    def build(config: Any, model_chunks: list[Any], config_overrides: Any = None, **kwargs: Any) -> MegatronOptimizer:
        return _OptimizerPerChunk(
            [
                original(config, [chunk], config_overrides=copy.deepcopy(config_overrides), **kwargs)
                for chunk in model_chunks
            ]
        )

    return build


class _WholeFP32Optimizer(FP32Optimizer):
    """A member of the layer-wise optimizer, which expects its members' checkpoints to look like 16-bit optimizers'."""

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {"optimizer": super().sharded_state_dict(*args, **kwargs)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict["optimizer"])


def _complete_layer_wise(optimizer: MegatronOptimizer, config: OptimizerConfig) -> None:
    """Wrap the layer-wise optimizer's members as Megatron optimizers in fp32 training.

    Megatron wraps them in bf16 training only; its own gradient norm then fails in fp32.
    """
    if isinstance(optimizer, LayerWiseDistributedOptimizer):
        optimizer.chained_optimizers = [
            _WholeFP32Optimizer(member, config, _allocate_state)
            if isinstance(member, torch.optim.Optimizer)
            else member
            for member in optimizer.chained_optimizers
        ]
        optimizer.config, optimizer.is_stub_optimizer = config, False
    elif isinstance(optimizer, ChainedOptimizer):
        for member in optimizer.chained_optimizers:
            _complete_layer_wise(member, config)
