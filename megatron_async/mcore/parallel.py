# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Process groups of a rank, and its place in them."""

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu, tensor_parallel
from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from megatron.core.utils import get_model_config
from megatron.training.initialize import initialize_megatron
from megatron.training.training import destroy_global_state
from torch.distributed.constants import default_pg_timeout

from megatron_async.mcore.patches import temporary

_ALONE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
"""What torch.distributed reads in a process that no launcher started; port 0 is any free one."""


def initialize(args: argparse.Namespace) -> None:
    """Start torch.distributed, Megatron's process groups and its random states.

    On GPUs this is Megatron's `initialize_megatron`. It skips process groups and the RNG tracker where there is no CUDA
    device, so on CPUs the same steps are taken here.
    """
    if args.world_size == 1:
        for name, value in _ALONE.items():
            os.environ.setdefault(name, value)
    if args.device == "cuda":
        initialize_megatron()
        return
    dist.init_process_group(
        backend=args.distributed_backend,
        world_size=args.world_size,
        rank=args.rank,
        timeout=timedelta(minutes=args.distributed_timeout_minutes),
    )
    _make_groups(
        args,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
        order="tp-cp-ep-dp-pp" if not args.use_tp_pp_dp_mapping else "tp-cp-ep-pp-dp",
        create_gloo_process_groups=args.use_gloo_process_groups,
    )
    initialize_megatron(allow_no_cuda=True, skip_model_parallel_init=True)
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed + 100 * mpu.get_pipeline_model_parallel_rank())


def _make_groups(args: argparse.Namespace, **options: Any) -> None:
    mpu.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        **options,
    )


def shut_down() -> None:
    """Destroy process groups and Megatron's global state, so that this process can start another run."""
    destroy_moe_metrics_tracker()
    destroy_global_state()
    mpu.destroy_model_parallel()
    dist.destroy_process_group()


def tensor_shards(param: torch.Tensor) -> tuple[dist.ProcessGroup, int] | None:
    """Tensor-parallel group and sharded dimension of a parameter; None for one that every rank holds whole."""
    dim = getattr(param, "partition_dim", -1)
    if not getattr(param, "tensor_model_parallel", False) or dim < 0:
        return None
    # Megatron marks the parameters of routed experts as not reduced with the others.
    dense = getattr(param, "allreduce", True)
    group = mpu.get_tensor_model_parallel_group() if dense else mpu.get_expert_tensor_parallel_group()
    return (group, dim) if group.size() > 1 else None


def pretend_rank(args: argparse.Namespace, rank: int) -> None:
    """Process groups of one rank of a job whose other processes do not exist. Nothing can be sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if args.device == "cuda" and torch.cuda.is_available():
        torch.cuda.set_device(args.local_rank)  # the RNG states below open a context: on a rank's own device
    dist.init_process_group("fake", rank=rank, world_size=args.world_size, store=FakeStore())
    with temporary.CREATE_GROUP.replaced(partial(_of_rank, rank)):
        _make_groups(args, create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)


def _of_rank(rank: int, original: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the groups of one rank alone, where a process has no others to agree with."""

    def create(ranks: Sequence[int], **options: Any) -> Any:
        return original(ranks, **options) if rank in ranks else None

    return create


@contextlib.contextmanager
def first_rank(args: argparse.Namespace) -> Iterator[None]:
    """As `pretend_rank`, for the first rank and for a time."""
    pretend_rank(args, 0)
    with _groups_destroyed():
        yield


@contextlib.contextmanager
def alone(args: argparse.Namespace) -> Iterator[None]:
    """Process groups of a job of one process, without a network."""
    backend = "nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(backend, rank=0, world_size=1, store=torch._C._distributed_c10d.HashStore())
    mpu.initialize_model_parallel(create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    with _groups_destroyed():
        yield


@contextlib.contextmanager
def _groups_destroyed() -> Iterator[None]:
    try:
        yield
    finally:
        destroy_moe_metrics_tracker()
        mpu.destroy_model_parallel()
        dist.destroy_process_group()


def device() -> torch.device:
    """Device of this rank's tensors. On CPU runs `torch.cuda.current_device` returns the CPU."""
    return torch.device(torch.cuda.current_device())


def timeout() -> timedelta:
    """Of operations of the job: `--distributed-timeout-minutes`. Without it, torch gives new groups its own default."""
    options = dist.distributed_c10d._get_default_group()._get_backend(device()).options
    limit: timedelta = default_pg_timeout if options is None else options._timeout  # torch's fake backend has none
    return limit


def store() -> Any:
    """The key-value store of the job's rendezvous."""
    return dist.distributed_c10d._get_default_store()


def reduce_over_tensor_parallel(chunk: Any) -> None:
    """Sum gradients of parameters that tensor-parallel ranks replicate but apply to different activations.

    These are norms under sequence parallelism and q/k norms. Waits for the tensor-parallel ranks, as forwards do.
    """
    _allreduce_non_tensor_model_parallel_grads([chunk], get_model_config(chunk), mpu.get_tensor_model_parallel_group())
