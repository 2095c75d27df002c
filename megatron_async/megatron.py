# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The one importer of private or version-dependent Megatron names (tested with megatron-core 0.19.2).

Everything else in the package imports Megatron's public classes or goes through here, so that a new Megatron
release is met in one file. `megatron_async.platform.activate` must have run before this module is imported.
"""

import argparse
import contextlib
import copy
import functools
import io
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, mpu, tensor_parallel
from megatron.core import optimizer as _optimizer
from megatron.core.dist_checkpointing import optimizer as _sharded_optimizer
from megatron.core.dist_checkpointing import serialization as _serialization
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies import filesystem_async as _filesystem
from megatron.core.dist_checkpointing.strategies import torch as _torch_dist
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads
from megatron.core.enums import ModelType
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_linear_attention_pattern,
    get_moe_layer_pattern,
    get_transformer_layer_with_experimental_attention_variant_spec,
)
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.msc_utils import MultiStorageClientFeature
from megatron.core.num_microbatches_calculator import get_num_microbatches, reconfigure_num_microbatches_calculator
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.emerging_optimizers import _EMERGING_OPTIMIZERS, EmergingOptimizerEntry
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
    param_group_identifier_keys,
)
from megatron.core.optimizer.optimizer_config import OptimizerConfig, ParamKey, ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from megatron.core.pipeline_parallel.schedules import (
    backward_step,
    deallocate_output_tensor,
    forward_step,
    get_tensor_shapes,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker, set_moe_metrics_tracker
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import (
    get_attr_wrapped_model,
    get_batch_on_this_tp_rank,
    get_model_config,
    unwrap_model,
)
from megatron.training import checkpointing as _checkpointing
from megatron.training import initialize as _initialize
from megatron.training import training
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import add_megatron_arguments, validate_args
from megatron.training.checkpointing import load_checkpoint as _load_checkpoint
from megatron.training.global_vars import (
    get_args,
    get_tensorboard_writer,
    get_tokenizer,
    get_wandb_writer,
    set_global_variables,
)
from megatron.training.models import GPTModelConfig
from megatron.training.models.gpt import GPTModelBuilder, default_layer_spec
from megatron.training.training import (
    build_train_valid_test_data_iterators,
    destroy_global_state,
    evaluate,
    num_floating_point_operations,
    preprocess_common_state_dict,
    update_train_iters,
)
from megatron.training.training import setup_model_and_optimizer as _setup_model_and_optimizer
from torch.distributed.checkpoint import FileSystemReader

__all__ = [
    "SHARDED_DATA",
    "ChainedOptimizer",
    "CheckpointPart",
    "GPTModelConfig",
    "MegatronOptimizer",
    "ProcessGroupCollection",
    "add_prefix_for_sharding",
    "alone",
    "arguments_of",
    "backward_step",
    "build_gpt",
    "build_train_valid_test_data_iterators",
    "check_arguments",
    "check_structure",
    "deallocate_output_tensor",
    "default_layer_spec",
    "dense_mlp_spec",
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
    "get_tokenizer",
    "get_wandb_writer",
    "gpt_config_from_args",
    "gpu_layer_specs",
    "initialize",
    "inner_optimizers",
    "is_layer_wise",
    "layers_of_stage",
    "linear_attention_pattern",
    "load_checkpoint",
    "load_common_state",
    "load_model_weights",
    "make_parser",
    "master_of",
    "master_params",
    "moe_layer_pattern",
    "mpu",
    "num_floating_point_operations",
    "param_group_identifier_keys",
    "plan_checkpoint",
    "pretend_rank",
    "pretrain_cfg_container_from_args",
    "publish_weights",
    "rank_from_environment",
    "save_model_weights",
    "set_global_variables",
    "setup_model_and_optimizer",
    "shards_of",
    "shut_down",
    "softmax_attentions",
    "step_unless_not_finite",
    "store",
    "tensor_parallel",
    "tensor_parallel_place",
    "tensor_shards",
    "tied_embedding",
    "timed_schedule",
    "undisturbed_random_states",
    "unwrap_model",
    "update_train_iters",
    "use_optimizers",
    "use_router_loss_tracker",
    "wandb_run",
    "watch_logits",
]


SHARDED_DATA = (ShardedTensor, ShardedTensorFactory)


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
    # Megatron's asynchronous saves need a worker process of its own and are switched off without it; ours do not.
    asynchronous, args.async_save = args.async_save, False
    try:
        with contextlib.redirect_stdout(printed), _logits_without_transformer_engine(args):
            validate_args(args)
    except SystemExit:
        return printed.getvalue().strip().splitlines()[-1]
    except (AssertionError, ValueError, RuntimeError, TypeError, ImportError) as error:
        return str(error) or _failed_assertion(error)
    finally:
        args.async_save = asynchronous
    return None


@contextlib.contextmanager
def _logits_without_transformer_engine(args: argparse.Namespace) -> Iterator[None]:
    """Hide the options that need attention logits from Megatron's check that Transformer Engine will report them
    (training/arguments.py: `'--qk-clip is only supported with TE >= 2.9.0.'`); `watch_logits` has them from the local
    attention too."""
    hidden = ("qk_clip", "log_max_attention_logit") if args.transformer_impl == "local" else ()
    values = {name: getattr(args, name) for name in hidden}
    vars(args).update(dict.fromkeys(values, False))
    try:
        yield
    finally:
        vars(args).update(values)


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
    for member in members(optimizer):
        yield from inner_optimizers(member)
    if not members(optimizer) and not optimizer.is_stub_optimizer:
        yield optimizer


def members(optimizer: MegatronOptimizer) -> Sequence[MegatronOptimizer]:
    """What a chain of optimizers consists of; nothing for one that is no chain."""
    return optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else ()


def master_params(optimizer: MegatronOptimizer) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any], torch.Tensor]]:
    """Every (torch optimizer, parameter group, parameter) that this rank steps on; with bf16, fp32 master copies."""
    for inner in inner_optimizers(optimizer):
        for group in inner.optimizer.param_groups:
            for param in group["params"]:
                yield inner.optimizer, group, param


def is_layer_wise(optimizer: MegatronOptimizer) -> bool:
    """Whether each parameter is stepped on by one data-parallel rank, which sends it to the others."""
    return isinstance(optimizer, LayerWiseDistributedOptimizer) or any(map(is_layer_wise, members(optimizer)))


def flat_sharded(optimizer: MegatronOptimizer) -> Iterator[tuple[dict[str, Any], torch.nn.Parameter]]:
    """(parameter group, model parameter) of what a distributed optimizer keeps in flat pieces over all ranks."""
    for inner in inner_optimizers(optimizer):
        if isinstance(inner, DistributedOptimizer):
            for param, (group, _) in inner.model_param_group_index_map.items():
                yield inner.optimizer.param_groups[group], param


def shards_of(optimizer: MegatronOptimizer) -> Iterator[tuple[torch.Tensor, torch.nn.Parameter]]:
    """(what a distributed optimizer steps on, the model parameter that it is a part of)."""
    for inner in inner_optimizers(optimizer):
        if isinstance(inner, DistributedOptimizer):
            for param, (group, position) in inner.model_param_group_index_map.items():
                yield inner.optimizer.param_groups[group]["params"][position], param


def flat_parts(optimizer: MegatronOptimizer) -> Iterator[tuple[torch.Tensor, torch.nn.Parameter, int]]:
    """`shards_of`, each with the position of its first element in the flattened parameter."""
    for inner in inner_optimizers(optimizer):
        if isinstance(inner, DistributedOptimizer):
            for param, (group, position) in inner.model_param_group_index_map.items():
                part = inner.optimizer.param_groups[group]["params"][position]
                yield part, param, inner._get_model_param_range_map(param)["param"].start


@torch.no_grad()
def publish_weights(optimizer: MegatronOptimizer) -> None:
    """Copy the master weights into the model on every data-parallel rank, as the end of an optimizer step does."""
    for inner in inner_optimizers(optimizer):
        if isinstance(inner, DistributedOptimizer | Float16OptimizerWithFloat16Params):
            inner._copy_main_params_to_model_params()
        if isinstance(inner, DistributedOptimizer):
            for chunk in inner.model_chunks:
                chunk.start_param_sync(force_sync=True)
    for member in (optimizer, *members(optimizer)):
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


def softmax_attentions(chunks: Sequence[torch.nn.Module]) -> list[Any]:
    """The self-attention modules with queries and keys of model chunks, in order of their layers."""
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, SelfAttention)]


def watch_logits(attention: Any, record: Callable[[torch.Tensor], None]) -> None:
    """Report the largest logits of every training forward of an attention module, recomputed ones too.

    Logits are what the softmax is taken of, scaled, without masked positions.

    - Megatron's local attention has them in one place, between the mask and the softmax
      (core/fusions/fused_softmax.py: `mask_output = self.mask_func(input, mask) if mask is not None else input`). The
      fused softmax kernels go around it. No mask is a sequence of one token, whose softmax does not depend on logits.
    - Transformer Engine's attention collects them itself where `config.qk_clip` or `config.log_max_attention_logit` is
      set (core/extensions/transformer_engine.py: `self.current_max_attn_logits = batch_max_attention_logits`).

    Args:
        attention: as from `softmax_attentions`.
        record: receives the largest logit of each head of this rank over a micro-batch, [heads].

    Raises:
        ValueError: the attention is of another kind.
    """
    core = attention.core_attention
    if isinstance(core, DotProductAttention):
        softmax, mask = core.scale_mask_softmax, core.scale_mask_softmax.mask_func

        def mask_and_record(scores: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            masked: torch.Tensor = mask(scores, attention_mask)
            if softmax.training:
                record(masked.detach().amax(dim=(0, 2, 3)))  # of [micro-batch, heads, queries, keys]
            return masked

        softmax.mask_func = mask_and_record
    elif hasattr(core, "current_max_attn_logits"):

        def take(module: Any, inputs: Any, output: Any) -> None:
            if module.training and module.current_max_attn_logits is not None:
                record(module.current_max_attn_logits)
            module.current_max_attn_logits = None

        core.register_forward_hook(take)
    else:
        raise ValueError(
            f"{type(core).__name__} does not report attention logits: leave --qk-clip and --log-max-attention-logit "
            "out, or use --transformer-impl local"
        )


def linear_attention_pattern(config: Any) -> list[int]:
    """1 for each layer with linear attention, 0 for each with softmax attention."""
    if config.experimental_attention_variant is None:
        return [0] * config.num_layers
    return get_linear_attention_pattern(config)


def moe_layer_pattern(config: Any) -> list[int]:
    """1 for each layer with experts, 0 for each with a dense feed-forward block."""
    return get_moe_layer_pattern(config)


def dense_mlp_spec(backend: Any) -> Any:
    """Megatron's dense feed-forward block out of the modules of `backend`."""
    return get_mlp_module_spec_for_backend(backend=backend, num_experts=None)


def gpu_layer_specs(config: Any) -> tuple[Any, list[Any]]:
    """The Transformer Engine backend and the specs of all layers of a model with linear attention."""
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    backend = TESpecProvider()
    return backend, get_transformer_layer_with_experimental_attention_variant_spec(config, backend)


def layers_of_stage(config: Any, vp_stage: int | None = None, pp_rank: int | None = None) -> list[int]:
    """Numbers, from 0, of the layers on a pipeline stage; this rank's unless `pp_rank` names another."""
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        return list(layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage, pp_rank=pp_rank))
    first = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=pp_rank)
    return list(range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pp_rank)))


def pretend_rank(args: argparse.Namespace, rank: int) -> None:
    """Process groups of one rank of a job whose other processes do not exist; nothing can be sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=args.world_size, store=FakeStore())
    mpu.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)


@contextlib.contextmanager
def alone(args: argparse.Namespace) -> Iterator[None]:
    """Process groups of a job of one process, without a network."""
    backend = "nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(backend, rank=0, world_size=1, store=torch._C._distributed_c10d.HashStore())
    mpu.initialize_model_parallel(create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    try:
        yield
    finally:
        mpu.destroy_model_parallel()
        dist.destroy_process_group()


def load_common_state(checkpoint: Path) -> dict[str, Any]:
    """What a distributed checkpoint holds besides tensors: the arguments, the iteration."""
    return dist_checkpointing.load_common_state_dict(str(checkpoint))


def _sharding(metadata: dict[str, Any] | None) -> dict[str, Any]:
    return (metadata or {}) | {"dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}


def load_model_weights(chunk: Any, checkpoint: Path) -> None:
    """Read the weights of a model chunk, as it is split here, from a distributed checkpoint of any layout."""
    metadata = dist_checkpointing.load_content_metadata(str(checkpoint))
    wanted = {"model": chunk.sharded_state_dict(metadata=_sharding(metadata))}
    chunk.load_state_dict(dist_checkpointing.load(wanted, str(checkpoint))["model"])


def save_model_weights(chunk: Any, args: argparse.Namespace, checkpoint: Path) -> None:
    """Write a whole model and its arguments as a distributed checkpoint of iteration 0, without optimizer."""
    metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    state = {
        "model": chunk.sharded_state_dict(metadata=_sharding(metadata)),
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 0,
        "num_floating_point_operations_so_far": 0,
    }
    dist_checkpointing.save(state, str(checkpoint), content_metadata=metadata)


def build_gpt(config: Any, groups: ProcessGroupCollection, vp_stage: int | None) -> torch.nn.Module:
    """One model chunk of this rank, unwrapped."""
    with contextlib.redirect_stdout(io.StringIO()):
        return GPTModelBuilder(config).build_model(groups, vp_stage=vp_stage)


def device() -> torch.device:
    """Where this rank's tensors live (on a CPU run `torch.cuda.current_device` answers with the CPU)."""
    return torch.device(torch.cuda.current_device())


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


def tensor_parallel_place(param: torch.Tensor) -> tuple[int, int]:
    """Size and rank of the tensor-parallel group that a parameter is cut over; experts may have one of their own."""
    if getattr(param, "allreduce", True):
        return mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    return mpu.get_expert_tensor_parallel_world_size(), mpu.get_expert_tensor_parallel_rank()


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


def step_unless_not_finite(
    optimizer: MegatronOptimizer, groups: list[list[torch.Tensor]] | None = None
) -> tuple[list[bool], float]:
    """Megatron's optimizer step, left out where the gradient's norm is not finite.

    The parts of `ChainedOptimizer.step` in their order, with one check between them.

    Args:
        optimizer: its gradients are reduced already.
        groups: parameters of the optimizer that are clipped, and skipped, by a norm of their own; one process only.

    Returns:
        Whether each group (or, without groups, everything) was skipped, and the global norm before clipping.
    """
    if optimizer.prepare_grads():  # fp16: the loss scaler found an overflow
        return [True] * len(groups or [[]]), math.nan
    if groups is None:
        norm = float(optimizer.get_grad_norm())
        if not math.isfinite(norm):
            return [True], math.nan
        for inner in inner_optimizers(optimizer):
            if inner.config.clip_grad > 0 and (params := inner.get_parameters()):
                clip_grad_by_total_norm_fp32(params, inner.config.clip_grad, norm)
        optimizer.step_with_ready_grads()
        return [False], norm
    norms = [_clip_or_forget(group, optimizer.config.clip_grad) for group in groups]
    optimizer.step_with_ready_grads()
    skipped = [not math.isfinite(norm) for norm in norms]
    return skipped, math.nan if any(skipped) else math.hypot(*norms)


def _clip_or_forget(params: list[torch.Tensor], clip_grad: float) -> float:
    """Clip one group by its own norm; forget its gradients, so that no optimizer touches it, if that is not finite."""
    norm = math.sqrt(sum(float(param.grad.double().square().sum()) for param in params if param.grad is not None))
    if not math.isfinite(norm):
        for param in params:
            param.grad = None
    elif clip_grad > 0 and params:
        clip_grad_by_total_norm_fp32(params, clip_grad, norm)
    return norm


def master_of(param: torch.nn.Parameter) -> torch.Tensor:
    """What the optimizer steps for a model parameter: its fp32 master copy in bf16 training, else itself."""
    master = getattr(param, "main_param", None)
    return param if master is None else master


def mark_delay(param: torch.nn.Parameter, delay: int) -> None:
    """Note on a parameter and its master how many updates old its gradients are; corrections leave 0 alone."""
    for tensor in (param, master_of(param)):
        tensor.gradient_delay = delay  # type: ignore[attr-defined]


def _sharded_state(param: Any, state: torch.Tensor, prefix: str) -> Any:
    """Describe a tensor of an optimizer's state for a checkpoint.

    Megatron knows those of the parameter's shape. Others, such as a second moment for each row, are kept whole, one
    for each part of the parameter: they follow it to another pipeline stage, not to another tensor-parallel size.
    """
    parts = [param] if isinstance(param, ShardedTensor) else list(nested_values(param.build()))
    if state.shape == (param.data.shape if param.data is not None else parts[0].local_shape):
        return _megatron_sharded_state(param, state, prefix)
    place = parts[0]
    name = "_".join(map(str, place.local_chunk_offset_in_global()))
    of = "_".join(map(str, place.axis_fragmentations))
    return ShardedObject(f"{prefix}.{param.key}.{name}_of_{of}", state, (1,), (0,), place.replica_id)


_megatron_sharded_state = _sharded_optimizer.make_sharded_optimizer_tensor
_sharded_optimizer.make_sharded_optimizer_tensor = _sharded_state


_megatron_set_states = DistributedOptimizer._set_main_param_and_optimizer_states


def _set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
    """Megatron's, for torch's Adam: its step count is a tensor and has been restored already (`_load_optimizer`).

    Here it would be looked for in vain, or be set to the one that the optimizer had before the load.
    """
    _megatron_set_states(self, model_param, {**tensors, "step": None})


DistributedOptimizer._set_main_param_and_optimizer_states = _set_states
_megatron_load_optimizer = DistributedOptimizer.load_state_dict


@functools.wraps(_megatron_load_optimizer)
def _load_optimizer(self: Any, state_dict: Any) -> None:
    """Megatron's, with a step count for each parameter.

    Megatron makes one tensor of it for all of them (`s["step"] = step`). torch's Adam adds one to it for every
    parameter that it steps on, so that each would be corrected for another, too large number of steps.
    """
    _megatron_load_optimizer(self, state_dict)
    for state in self.optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()


DistributedOptimizer.load_state_dict = _load_optimizer
_megatron_state_keys = DistributedOptimizer.optimizer_state_keys.fget
# Megatron's list of the state tensors that it gathers and cuts, and those that `extra_state_keys` adds to it.
DistributedOptimizer.optimizer_state_keys = property(
    lambda self: (*_megatron_state_keys(self), *getattr(self, "extra_state_keys", ()))
)


@torch.no_grad()
def load_checkpoint(
    model: list[Any],
    optimizer: MegatronOptimizer,
    scheduler: Any,
    common: Callable[[dict[str, Any]], dict[str, Any]] = lambda state: state,
) -> tuple[int, float]:
    """Megatron's `load_checkpoint`: iteration and operations so far.

    The distributed optimizer loads into views of the weights, which autograd would refuse.

    Args:
        common: changes what the checkpoint holds besides tensors, before it is merged with them.
    """
    original = _serialization.load_common_state_dict
    _serialization.load_common_state_dict = lambda *values, **options: common(original(*values, **options))
    try:
        iteration, operations = _load_checkpoint(model, optimizer, scheduler)
    finally:
        _serialization.load_common_state_dict = original
    return iteration, operations


class CheckpointPart:
    """This rank's part of a checkpoint that has been planned with all ranks and not been written yet.

    Attributes:
        folder: the checkpoint's.
        file: name of the file that this rank writes into it.
    """

    def __init__(self, writer: "_PartWriter", index: Any) -> None:
        self._writer, self._index = writer, index
        self.folder, self.file = Path(writer.checkpoint_dir), writer.file

    def copy_tensors(self) -> None:
        """Copy every tensor to the host, as it is now: it may change before `write`."""
        self._writer.items = [
            (item, data.to("cpu", copy=True) if isinstance(data, torch.Tensor) else data)
            for item, data in self._writer.items
        ]

    def write(self) -> list[Any]:
        """Write this rank's file and force it to the disk; what `write_index` needs to know about it.

        Tensors are let go one by one. An empty part leaves no file.
        """
        items, self._writer.items = self._writer.items[::-1], []
        results = []
        with contextlib.ExitStack() as opened:
            stream = opened.enter_context((self.folder / self.file).open("wb")) if items else None
            while items:
                item, data = items.pop()
                results.append(
                    _filesystem._write_item(
                        self._writer.transforms,
                        stream,
                        _compact(data) if isinstance(data, torch.Tensor) else data,
                        item,
                        self.file,
                        serialization_format=self._writer.serialization_format,
                    )
                )
            if stream is not None:
                stream.flush()
                os.fsync(stream.fileno())
        return results

    def write_index(self, results: Sequence[list[Any]]) -> None:
        """On rank 0, when all files are there: write the index of what every rank's `write` has returned."""
        self._writer.finish(self._index, list(results))


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the host whose storage holds nothing else; a view would be written with all that it is a view of."""
    tensor = tensor.to("cpu")
    whole = tensor.untyped_storage().size() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone()


class _PartWriter(_filesystem.FileSystemWriterAsync):
    """Keeps what this rank has to write, where Megatron's would prepare its worker threads."""

    file: str
    items: list[tuple[Any, Any]]

    def prepare_write_data(self, plan: Any, planner: Any) -> None:
        self.file = f"{plan.storage_data.prefix}0{_filesystem.DEFAULT_SUFFIX}"
        self.items = [(item, _plain_data(planner.resolve_data(item))) for item in plan.items]


def _plain_data(data: Any) -> Any:
    """What is written for a planned item; like Megatron, no quantized tensors."""
    if not isinstance(data, torch.Tensor):
        return data
    return data.dequantize() if "dequantize" in type(data).__dict__ else data.detach()


class _PlanningStrategy(_checkpointing.TorchDistSaveShardedStrategy):
    """Agrees with all ranks on who writes what, and leaves the writing to `part`."""

    def save(self, sharded_state_dict: Any, checkpoint_dir: Path) -> None:
        kept, _, _ = _torch_dist._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        writer = _PartWriter(checkpoint_dir)
        planner = _torch_dist.MCoreSavePlanner(
            dedup_replicated_tensors=not self.keep_only_main_replica,
            flatten_state_dict=False,
            flatten_sharded_tensors=False,
        )
        (_, index, _), *_ = save_state_dict_async_plan(
            _torch_dist.mcore_to_pyt_state_dict(kept, False), writer, planner=planner
        )
        self.part = CheckpointPart(writer, index)


def plan_checkpoint(
    iteration: int, model: list[Any], optimizer: MegatronOptimizer, scheduler: Any, operations: float
) -> CheckpointPart:
    """Megatron's `save_checkpoint` up to the point where tensors would be written. Collective.

    Without its note to wandb and its message of success, since nothing has been written yet.
    """
    _checkpointing.TorchDistSaveShardedStrategy = _PlanningStrategy
    _checkpointing.wandb_utils.on_save_checkpoint_success = lambda *_: None
    context: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        _checkpointing.save_checkpoint(
            iteration,
            model,
            optimizer,
            scheduler,
            operations,
            checkpointing_context=context,
            preprocess_common_state_dict_fn=preprocess_common_state_dict,
        )
    strategy = context["save_strategy"]
    part: CheckpointPart = getattr(strategy, "base_strategy", strategy).part
    return part


def arguments_of(checkpoint: Path) -> dict[str, Any]:
    """Resolved arguments of the run that saved a checkpoint, from Megatron's part of it."""
    state = dist_checkpointing.load_common_state_dict(str(checkpoint))
    return dict(vars(state["args"])) if "args" in state else {}


def check_structure(checkpoint: Path) -> None:
    """Check that every tensor in a checkpoint's index lies within its files.

    Raises:
        ValueError: one does not; the index cannot be read.
    """
    index = FileSystemReader(str(checkpoint)).read_metadata()
    ends: dict[str, int] = {}
    for place in (index.storage_data or {}).values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in ends.items():
        size = (checkpoint / name).stat().st_size
        if size < end:
            raise ValueError(f"{checkpoint / name} has {size} bytes, the index needs {end}")


def store() -> Any:
    """The store that the job's processes met by."""
    return dist.distributed_c10d._get_default_store()


def wandb_run() -> str | None:
    """Id of the wandb run that this job logs to, on every rank. Collective."""
    wandb = get_wandb_writer()
    ids: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(ids, wandb.run.id if wandb is not None and wandb.run is not None else None)
    return next((name for name in ids if name), None)


@contextlib.contextmanager
def undisturbed_random_states() -> Iterator[None]:
    """Random states afterwards are what they were before, whatever the block drew."""
    tracker = tensor_parallel.get_cuda_rng_tracker()
    before = random.getstate(), np.random.get_state(), torch.get_rng_state(), torch.cuda.get_rng_state()
    tracked = tracker.get_states()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.cuda.set_rng_state(before[3])
        torch.set_rng_state(before[2])
        tracker.set_states(tracked)


def use_router_loss_tracker(tracker: Any) -> None:
    """Let routers report their losses to an object with the `record` method of Megatron's `MoEMetricsTracker`."""
    set_moe_metrics_tracker(tracker)


def shut_down() -> None:
    """Destroy process groups and Megatron's global state, so that this process can start another run."""
    destroy_moe_metrics_tracker()
    destroy_global_state()
    mpu.destroy_model_parallel()
    dist.destroy_process_group()


def norm_groups(optimizer: MegatronOptimizer) -> Iterator[tuple[MegatronOptimizer, dist.ProcessGroup | None]]:
    """Optimizers that own a torch optimizer, each with the group whose ranks hold the other parts of its gradient.

    None is the whole job. The layer-wise optimizer deals whole parameters out to data-parallel ranks and therefore
    sums over all of them, whatever its members say.
    """
    if isinstance(optimizer, LayerWiseDistributedOptimizer):
        yield from ((inner, None) for inner in inner_optimizers(optimizer))
    elif isinstance(optimizer, ChainedOptimizer):
        for member in optimizer.chained_optimizers:
            yield from norm_groups(member)
    elif not optimizer.is_stub_optimizer:
        yield optimizer, optimizer.get_grad_stats_parallel_group()


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


def weight_buffers(chunk: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Megatron's flat buffers that hold weights (distributed optimizer only), each with its bucket groups."""
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        if buffer.param_data is not None:
            groups = [
                group
                for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
                if any(bucket in buffer.buckets for bucket in group.buckets)
            ]
            yield buffer, groups


def fp32_shards(optimizer: MegatronOptimizer) -> Iterator[torch.Tensor]:
    """What the distributed optimizer steps in fp32 training: this rank's parts of the weights, as views of them."""
    for inner in inner_optimizers(optimizer):
        if isinstance(inner, DistributedOptimizer):
            yield from (shard for shards in inner.shard_fp32_groups for shard in shards)


def shares_storage(part: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether `part` is a view of the storage of `whole`."""
    return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def reduce_over_tensor_parallel(chunk: Any) -> None:
    """Add up gradients of parameters that tensor-parallel ranks hold in common but feed different parts of the
    activations: norms under sequence parallelism, q/k norms. Waits for the tensor-parallel ranks, as forwards do."""
    _allreduce_non_tensor_model_parallel_grads([chunk], get_model_config(chunk), mpu.get_tensor_model_parallel_group())


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


def scheduler_for(scheduler: Any, optimizer: MegatronOptimizer) -> Any:
    """Megatron's learning-rate scheduler with the same settings and progress, for another optimizer."""
    copied = copy.copy(scheduler)
    copied.optimizer = optimizer
    return copied


def decoder_layers_of(layout: str) -> int:
    """Number of decoder layers in a `--pipeline-model-parallel-layout`.

    Raises:
        AssertionError: a letter that Megatron does not know.
    """
    return sum(part.count(LayerType.decoder) for part in PipelineParallelLayerLayout.parse_str_to_list(layout))


def stage_of(rank: int) -> int:
    """Pipeline stage of a global rank. Collective: every rank must call it, in the same order."""
    stage = torch.tensor([mpu.get_pipeline_model_parallel_rank()], device=device())
    dist.broadcast(stage, src=rank)
    return int(stage.item())


def data_parallel(module: torch.nn.Module, args: argparse.Namespace) -> Any:
    """A model chunk of any kind in Megatron's data-parallel wrapper; the module has a `config`."""
    return DistributedDataParallel(
        config=module.config,
        ddp_config=DistributedDataParallelConfig(use_distributed_optimizer=args.use_distributed_optimizer),
        module=module,
    )


def optimizer_for(chunks: list[Any], args: argparse.Namespace) -> MegatronOptimizer:
    """Megatron's optimizer of wrapped chunks, for SGD and Adam."""
    config = OptimizerConfig(
        optimizer=args.optimizer,
        lr=args.lr,
        weight_decay=args.weight_decay,
        sgd_momentum=args.sgd_momentum,
        clip_grad=args.clip_grad,
    )
    return get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)


@contextlib.contextmanager
def shape_of_schedule(*, microbatches: int, virtual_stages: int | None) -> Iterator[None]:
    """Let what is built inside see other numbers of micro-batches and virtual stages than the run's arguments give."""
    before = get_num_microbatches()

    def set_shape(microbatches: int, virtual_stages: int | None) -> None:
        reconfigure_num_microbatches_calculator(
            rank=1, global_batch_size=microbatches, micro_batch_size=1, data_parallel_size=1
        )
        mpu.set_virtual_pipeline_model_parallel_world_size(virtual_stages)

    set_shape(microbatches, virtual_stages)
    try:
        yield
    finally:
        set_shape(before, None)
