# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The one importer of private or version-dependent Megatron names (tested with megatron-core 0.19.2).

Everything else in the package imports Megatron's public classes or goes through here, so that a new Megatron
release is met in one file. `megatron_async.platform.activate` must have run before this module is imported.
"""

import argparse
import contextlib
import io
import math
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu, tensor_parallel
from megatron.core import optimizer as _optimizer
from megatron.core.distributed import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.msc_utils import MultiStorageClientFeature
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.emerging_optimizers import _EMERGING_OPTIMIZERS, EmergingOptimizerEntry
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from megatron.core.pipeline_parallel.schedules import (
    backward_step,
    deallocate_output_tensor,
    forward_step,
    get_tensor_shapes,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import (
    get_attr_wrapped_model,
    get_batch_on_this_tp_rank,
    get_model_config,
    unwrap_model,
)
from megatron.training import initialize as _initialize
from megatron.training import training as _training
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import add_megatron_arguments, validate_args
from megatron.training.checkpointing import checkpoint_exists, save_checkpoint
from megatron.training.global_vars import (
    get_args,
    get_tensorboard_writer,
    get_timers,
    get_tokenizer,
    get_wandb_writer,
    set_global_variables,
)
from megatron.training.models import GPTModelConfig
from megatron.training.training import (
    build_train_valid_test_data_iterators,
    destroy_global_state,
    evaluate,
    num_floating_point_operations,
    setup_model_and_optimizer,
    update_train_iters,
)

__all__ = [
    "GPT",
    "ChainedOptimizer",
    "GPTModelConfig",
    "MegatronOptimizer",
    "ProcessGroupCollection",
    "backward_step",
    "build_train_valid_test_data_iterators",
    "check_arguments",
    "checkpoint_exists",
    "deallocate_output_tensor",
    "evaluate",
    "finalize_model_grads",
    "flat_sharded",
    "forward_step",
    "get_args",
    "get_attr_wrapped_model",
    "get_batch_on_this_tp_rank",
    "get_canonical_lr_for_logging",
    "get_forward_backward_func",
    "get_model_config",
    "get_num_microbatches",
    "get_tensor_shapes",
    "get_tensorboard_writer",
    "get_timers",
    "get_tokenizer",
    "get_wandb_writer",
    "gpt_config_from_args",
    "initialize",
    "inner_optimizers",
    "is_layer_wise",
    "make_parser",
    "master_params",
    "mpu",
    "num_floating_point_operations",
    "pretrain_cfg_container_from_args",
    "publish_weights",
    "rank_from_environment",
    "save_checkpoint",
    "set_global_variables",
    "setup_model_and_optimizer",
    "shut_down",
    "step_unless_not_finite",
    "tensor_shards",
    "tied_embedding",
    "timed_schedule",
    "unwrap_model",
    "update_train_iters",
    "use_optimizers",
]


GPT = ModelType.encoder_or_decoder


def make_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add every Megatron-LM argument to `parser`."""
    return add_megatron_arguments(parser)


def rank_from_environment(args: argparse.Namespace) -> None:
    """Set what Megatron's own `parse_args` takes from outside the command line: rank, world size, storage client."""
    args._is_global_batch_size_explicitly_specified = args.global_batch_size is not None
    args.rank = int(os.environ.get("RANK", "0"))
    args.world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if args.enable_msc:
        MultiStorageClientFeature.enable()
    else:
        MultiStorageClientFeature.disable()


def check_arguments(args: argparse.Namespace) -> str | None:
    """Run Megatron's own validation (it also derives values). Return its first objection, or None.

    Megatron stops at its first failed check, with an assertion, an exception or `exit()`.
    """
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            validate_args(args)
    except SystemExit:
        return printed.getvalue().strip().splitlines()[-1]
    except (AssertionError, ValueError, RuntimeError, TypeError, ImportError) as error:
        return str(error) or _failed_assertion(error)
    return None


def _failed_assertion(error: BaseException) -> str:
    """The source line of an assertion without a message: better than nothing."""
    traceback = error.__traceback__
    assert traceback is not None
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    import linecache

    code = traceback.tb_frame.f_code
    line = linecache.getline(code.co_filename, traceback.tb_lineno).strip()
    return f"Megatron requires: {line.removeprefix('assert ')}"


def initialize(args: argparse.Namespace) -> None:
    """Start torch.distributed, Megatron's model-parallel groups and its random states.

    On GPUs this is Megatron's `initialize_megatron`. On CPUs the same steps run here, because Megatron skips
    model-parallel groups and the random state tracker when there is no CUDA device. On both, the compilation of
    the data set helper is left out: the wheel ships it compiled, without the Makefile that Megatron would call.
    """
    _initialize._compile_dependencies = lambda: dist.barrier()
    if args.device == "cuda":
        _initialize.initialize_megatron()
        return
    dist.init_process_group(
        backend=args.distributed_backend,
        world_size=args.world_size,
        rank=args.rank,
        timeout=timedelta(minutes=args.distributed_timeout_minutes),
    )
    mpu.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
        order="tp-cp-ep-dp-pp" if not args.use_tp_pp_dp_mapping else "tp-cp-ep-pp-dp",
        create_gloo_process_groups=args.use_gloo_process_groups,
    )
    _initialize.initialize_megatron(allow_no_cuda=True, skip_model_parallel_init=True)
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed + 100 * mpu.get_pipeline_model_parallel_rank())


def inner_optimizers(optimizer: MegatronOptimizer) -> Iterator[MegatronOptimizer]:
    """The Megatron optimizers that own a torch optimizer each, in Megatron's order; stubs are left out."""
    chain = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    for member in chain:
        if isinstance(member, ChainedOptimizer):
            yield from inner_optimizers(member)
        elif not member.is_stub_optimizer:
            yield member


def master_params(optimizer: MegatronOptimizer) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any], torch.Tensor]]:
    """Every (torch optimizer, parameter group, parameter) that this rank steps on; with bf16, fp32 master copies."""
    for inner in inner_optimizers(optimizer):
        for group in inner.optimizer.param_groups:
            for param in group["params"]:
                yield inner.optimizer, group, param


def is_layer_wise(optimizer: MegatronOptimizer) -> bool:
    """Whether each parameter is stepped on by one data-parallel rank, which sends it to the others."""
    chain = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else []
    return isinstance(optimizer, LayerWiseDistributedOptimizer) or any(is_layer_wise(member) for member in chain)


def flat_sharded(optimizer: MegatronOptimizer) -> Iterator[tuple[dict[str, Any], torch.nn.Parameter]]:
    """(parameter group, model parameter) of what a distributed optimizer keeps in flat pieces over all ranks."""
    for inner in inner_optimizers(optimizer):
        if isinstance(inner, DistributedOptimizer):
            for param, (group, _) in inner.model_param_group_index_map.items():
                yield inner.optimizer.param_groups[group], param


@torch.no_grad()
def publish_weights(optimizer: MegatronOptimizer) -> None:
    """Copy the master weights into the model on every data-parallel rank, as the end of an optimizer step does."""
    for inner in inner_optimizers(optimizer):
        if isinstance(inner, DistributedOptimizer | Float16OptimizerWithFloat16Params):
            inner._copy_main_params_to_model_params()
        if isinstance(inner, DistributedOptimizer):
            for chunk in inner.model_chunks:
                chunk.start_param_sync(force_sync=True)
    chain = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else []
    for member in (optimizer, *chain):
        if isinstance(member, LayerWiseDistributedOptimizer):
            member.allgather_params()


def tensor_shards(param: torch.Tensor) -> tuple[dist.ProcessGroup, int] | None:
    """Process group and axis of a parameter's tensor-parallel cut; None for one that every rank has whole."""
    dim = getattr(param, "partition_dim", -1)
    if not getattr(param, "tensor_model_parallel", False) or dim < 0:
        return None
    groups = ProcessGroupCollection.use_mpu_process_groups()
    # Megatron marks the parameters of routed experts as not reduced with the others.
    group = groups.tp if getattr(param, "allreduce", True) else groups.expt_tp
    return (group, dim) if group.size() > 1 else None


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
    _training.get_megatron_optimizer = _optimizer.get_megatron_optimizer
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

    _training.get_megatron_optimizer = get_optimizer
    _optimizer._get_megatron_optimizer_based_on_param_groups = build_others


_megatron_builds = _optimizer._get_megatron_optimizer_based_on_param_groups


def _allocate_state(optimizer: Any, config: Any = None) -> None:
    """Give every parameter its optimizer state without a step: a checkpoint is loaded into it."""
    for group in optimizer.param_groups:
        if hasattr(optimizer, "init_states"):
            optimizer.init_states()
            return
        optimizer._init_group(group, skip_non_grad_params=False)


def device() -> torch.device:
    """Where this rank's tensors live (on a CPU run `torch.cuda.current_device` answers with the CPU)."""
    return torch.device(torch.cuda.current_device())


def tied_embedding(chunk: torch.nn.Module) -> torch.nn.Parameter | None:
    """The weight that the first and last stage share as embedding and head, where this rank holds one of two copies."""
    model = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
    if mpu.get_pipeline_model_parallel_world_size() == 1 or not model.share_embeddings_and_output_weights:
        return None
    return model.shared_embedding_or_output_weight() if model.pre_process or model.post_process else None


@contextlib.contextmanager
def timed_schedule(timeline: Any, batch: int, microbatches: int) -> Iterator[None]:
    """Measure the forwards and backwards of one batch that Megatron's own schedule function runs.

    Args:
        timeline: receives one span for each.
        batch, microbatches: number of the batch and micro-batches in it, for the labels.
    """
    originals = {"F": schedules.forward_step, "B": schedules.backward_step}

    def timed(kind: str) -> Callable[..., Any]:
        numbers = count(batch * microbatches)

        def step(*args: Any, **kwargs: Any) -> Any:
            with timeline.span(kind, batch=batch, microbatch=next(numbers), version=batch):
                return originals[kind](*args, **kwargs)

        return step

    schedules.forward_step, schedules.backward_step = timed("F"), timed("B")
    try:
        yield
    finally:
        schedules.forward_step, schedules.backward_step = originals["F"], originals["B"]


def step_unless_not_finite(optimizer: MegatronOptimizer) -> tuple[bool, float]:
    """Megatron's optimizer step, left out when the gradient's norm is not finite: (skipped, global norm before clipping).

    The parts of `ChainedOptimizer.step` in their order, with one check between them.
    """
    if optimizer.prepare_grads():  # fp16: the loss scaler found an overflow
        return True, math.nan
    norm = float(optimizer.get_grad_norm())
    if not math.isfinite(norm):
        return True, norm
    for inner in inner_optimizers(optimizer):
        if inner.config.clip_grad > 0 and (params := inner.get_parameters()):
            clip_grad_by_total_norm_fp32(params, inner.config.clip_grad, norm)
    optimizer.step_with_ready_grads()
    return False, norm


def shut_down() -> None:
    """Destroy process groups and Megatron's global state, so that this process can start another run."""
    destroy_global_state()
    mpu.destroy_model_parallel()
    dist.destroy_process_group()
