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
import random
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, mpu, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.distributed import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.msc_utils import MultiStorageClientFeature
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
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
from megatron.training import checkpointing as _checkpointing
from megatron.training import initialize as _initialize
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import add_megatron_arguments, validate_args
from megatron.training.checkpointing import load_checkpoint
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
    preprocess_common_state_dict,
    update_train_iters,
)
from megatron.training.training import setup_model_and_optimizer as _setup_model_and_optimizer
from torch.distributed.checkpoint import FileSystemReader

__all__ = [
    "SHARDED_DATA",
    "ChainedOptimizer",
    "GPTModelConfig",
    "MegatronOptimizer",
    "ProcessGroupCollection",
    "add_prefix_for_sharding",
    "arguments_of",
    "backward_step",
    "build_train_valid_test_data_iterators",
    "check_arguments",
    "check_structure",
    "deallocate_output_tensor",
    "evaluate",
    "finalize_model_grads",
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
    "load_checkpoint",
    "make_parser",
    "mpu",
    "num_floating_point_operations",
    "pretrain_cfg_container_from_args",
    "rank_from_environment",
    "save_checkpoint",
    "set_global_variables",
    "setup_model_and_optimizer",
    "shut_down",
    "step_unless_not_finite",
    "store",
    "tied_embedding",
    "timed_schedule",
    "undisturbed_random_states",
    "unwrap_model",
    "update_train_iters",
    "wandb_run",
]


SHARDED_DATA = (ShardedTensor, ShardedTensorFactory)


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
            ModelType.encoder_or_decoder,
            cfg_container=container,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
    finally:
        args.load, args.pretrained_checkpoint = sources
    return model, optimizer, scheduler


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


def save_checkpoint(
    iteration: int, model: list[Any], optimizer: MegatronOptimizer, scheduler: Any, operations: float
) -> None:
    """Megatron's `save_checkpoint`, without its note to wandb: the folder is renamed afterwards."""
    _checkpointing.wandb_utils.on_save_checkpoint_success = lambda *_: None
    _checkpointing.save_checkpoint(
        iteration,
        model,
        optimizer,
        scheduler,
        operations,
        preprocess_common_state_dict_fn=preprocess_common_state_dict,
    )


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


def store() -> dist.Store:
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


def shut_down() -> None:
    """Destroy process groups and Megatron's global state, so that this process can start another run."""
    destroy_global_state()
    mpu.destroy_model_parallel()
    dist.destroy_process_group()
