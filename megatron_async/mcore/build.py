# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Megatron's set-up of model and optimizer, with optimizers that it does not know."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import optimizer as _optimizer
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
from megatron.training.training import setup_model_and_optimizer as _setup_model_and_optimizer

GPT = ModelType.encoder_or_decoder


BuildOptimizer = Callable[[str, list[dict[str, Any]], list[Any]], torch.optim.Optimizer]


"""(name, parameter groups, model chunks) -> torch optimizer."""


def use_optimizers(
    build: BuildOptimizer, optimizer_of: Callable[[str, torch.Tensor], str], names: Sequence[str]
) -> None:
    """Let Megatron build optimizers that it does not know, and several kinds of them side by side.

    Megatron's registry takes one optimizer and sends what is left to Adam; a table of which optimizer steps on which
    parameter needs two changes. The chosen optimizer is registered under a name of our own, because for "muon"
    Megatron rewrites the table. The function that builds the others builds them all.

    Args:
        build: makes the torch optimizer of a name other than "adam" and "sgd".
        optimizer_of: parameter name, parameter -> optimizer name.
        names: optimizers in use, the chosen one first.
    """
    training.get_megatron_optimizer = _optimizer.get_megatron_optimizer
    _optimizer._get_megatron_optimizer_based_on_param_groups = _megatron_builds
    chosen, *others = names
    if chosen in ("adam", "sgd"):
        return
    alias = f"megatron_async-{chosen}"

    def predicate(name: str) -> ParamKey:
        return ParamKey(
            with_name_predicate=ParamWithNamePredicate(
                name, lambda param, full_name: optimizer_of(full_name, param) == name
            )
        )

    def make(groups: list[dict[str, Any]], model_chunks: list[Any]) -> torch.optim.Optimizer:
        return build(chosen, groups, model_chunks)

    _EMERGING_OPTIMIZERS[alias] = EmergingOptimizerEntry(
        optimizer_cls=make,
        init_state_fn=_allocate_state,
        config_to_kwargs=lambda config, model_chunks, groups: {"model_chunks": model_chunks},
        default_param_overrides={predicate(name): {"optimizer": name} for name in others},
    )

    def get_optimizer(config: Any, model: list[Any], *args: Any, **kwargs: Any) -> MegatronOptimizer:
        config.optimizer = alias
        optimizer = _optimizer.get_megatron_optimizer(config, model, *args, **kwargs)
        config.optimizer = chosen
        return optimizer

    def build_others(*, config: Any, model_chunks: list[Any], param_groups: list[dict[str, Any]], **kwargs: Any) -> Any:
        if config.optimizer in ("adam", "sgd"):
            return _megatron_builds(config=config, model_chunks=model_chunks, param_groups=param_groups, **kwargs)
        optimizer = build(config.optimizer, param_groups, model_chunks)
        if kwargs.get("skip_megatron_wrapping"):
            return optimizer, _allocate_state
        wrap = Float16OptimizerWithFloat16Params if config.bf16 else FP32Optimizer
        wrapped = wrap(optimizer, config, *((None,) if config.bf16 else ()), _allocate_state)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        wrapped.grad_stats_parallel_group = kwargs["model_parallel_group"]
        wrapped.tp_group, wrapped.expert_tp_group = groups.tp, groups.expt_tp
        return wrapped

    training.get_megatron_optimizer = get_optimizer
    _optimizer._get_megatron_optimizer_based_on_param_groups = build_others


_megatron_builds = _optimizer._get_megatron_optimizer_based_on_param_groups


def _allocate_state(optimizer: Any, config: Any = None) -> None:
    """Give every parameter its optimizer state without a step: a checkpoint is loaded into it."""
    for group in optimizer.param_groups:
        if hasattr(optimizer, "init_states"):
            optimizer.init_states()
            return
        optimizer._init_group(group, skip_non_grad_params=False)


def setup_model_and_optimizer(container: Any) -> tuple[list[Any], MegatronOptimizer, Any]:
    """Megatron's model chunks, optimizer and learning-rate scheduler, freshly initialized: nothing is loaded yet."""
    args = get_args()
    sources = args.load, args.pretrained_checkpoint
    args.load = args.pretrained_checkpoint = None
    try:
        model, optimizer, scheduler = _setup_model_and_optimizer(
            GPT,
            cfg_container=container,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
    finally:
        args.load, args.pretrained_checkpoint = sources
    return model, optimizer, scheduler


class _WholeFP32Optimizer(FP32Optimizer):
    """A member of the layer-wise optimizer, which takes its members' checkpoints to look like 16-bit optimizers'."""

    def __init__(self, optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> None:
        super().__init__(optimizer, config, _make_state)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {"optimizer": super().sharded_state_dict(*args, **kwargs)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict["optimizer"])


def _make_state(optimizer: Any, config: Any = None) -> None:
    """Give every parameter its optimizer state without a step; the step count of Adam is restored elsewhere."""
    if not isinstance(optimizer, torch.optim.Adam):
        _allocate_state(optimizer)
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            for name in ("exp_avg", "exp_avg_sq"):
                optimizer.state[param].setdefault(name, torch.zeros_like(param))


def complete_layer_wise(optimizer: MegatronOptimizer, config: OptimizerConfig) -> None:
    """Give the layer-wise optimizer's members the interface of Megatron optimizers in fp32 training too.

    Megatron wraps them in bf16 training only; its own gradient norm then fails in fp32.
    """
    if isinstance(optimizer, LayerWiseDistributedOptimizer):
        optimizer.chained_optimizers = [
            _WholeFP32Optimizer(member, config) if isinstance(member, torch.optim.Optimizer) else member
            for member in optimizer.chained_optimizers
        ]
        optimizer.config, optimizer.is_stub_optimizer = config, False
    elif isinstance(optimizer, ChainedOptimizer):
        for member in optimizer.chained_optimizers:
            complete_layer_wise(member, config)


class _OptimizerPerChunk(ChainedOptimizer):
    """A chain of chunks' optimizers, each of which may be a chain itself."""

    def _synchronize_steps(self) -> None:
        """Nothing: the chain of each chunk does this by itself, and an update of one chunk may be skipped."""


@contextlib.contextmanager
def one_optimizer_per_chunk() -> Iterator[None]:
    """Let Megatron's set-up build a separate optimizer for each model chunk, chained in their order.

    Schedules that update a rank's chunks at different times need it.
    """
    original = training.get_megatron_optimizer

    def build(config: Any, model_chunks: list[Any], **options: Any) -> MegatronOptimizer:
        overrides = options.pop("config_overrides", None)
        return _OptimizerPerChunk(
            [original(config, [chunk], config_overrides=copy.deepcopy(overrides), **options) for chunk in model_chunks]
        )

    training.get_megatron_optimizer = build
    try:
        yield
    finally:
        training.get_megatron_optimizer = original
