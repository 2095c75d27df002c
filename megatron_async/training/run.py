# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""From checked arguments to a finished run: Megatron's building blocks in order."""

import argparse
import contextlib
import platform
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist

import megatron_async
from megatron_async import megatron
from megatron_async.data.datasets import train_valid_test_datasets
from megatron_async.models import gpt
from megatron_async.optim import registry
from megatron_async.training import trace
from megatron_async.training.loop import Loop
from megatron_async.training.metrics import Metrics, MetricsFile, Scale


def pretrain(args: argparse.Namespace) -> None:
    """Train a GPT as `args` says, from process groups to their end."""
    loop = build(args)
    try:
        loop.run()
        if args.trace_file:
            trace.write(args.trace_file, loop.timeline)
    finally:
        loop.metrics.close()
    close()


def build(args: argparse.Namespace) -> Loop:
    """Process groups, model, optimizer, data and log of a run, ready to start."""
    megatron.set_global_variables(args)
    megatron.initialize(args)
    if args.pipeline_schedule != "1f1b":
        # The schedule reduces gradients itself, behind the next batch; Megatron's overlap would do it a second time.
        args.overlap_grad_reduce = False
    # A gradient that is not finite is skipped and counted, under every schedule alike; Megatron's own check would
    # stop the run from inside the reduction.
    args.check_for_nan_in_loss_and_grad = False
    if args.rank == 0:
        print(f"> {args.device_sentence}", flush=True)
    megatron.update_train_iters(args)
    registry.register(args)
    container = megatron.pretrain_cfg_container_from_args(args, gpt.model_config(args))
    with megatron.one_optimizer_per_chunk() if args.pipeline_schedule == "wpipe" else contextlib.nullcontext():
        model, optimizer, scheduler = megatron.setup_model_and_optimizer(
            megatron.GPT,
            cfg_container=container,
            pg_collection=megatron.ProcessGroupCollection.use_mpu_process_groups(),
        )
    megatron.complete_layer_wise(optimizer, container.optimizer)
    registry.finish(args, model, optimizer)
    train_data, valid_data = _data_iterators(args)
    return Loop(
        args=args,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        forward_step=gpt.ForwardStep(args),
        train_data=train_data,
        valid_data=valid_data,
        metrics=_metrics(args),
    )


def close() -> None:
    """End a run in this process: its writers, process groups and Megatron's global state."""
    if (wandb := megatron.get_wandb_writer()) is not None:
        wandb.finish()
    dist.barrier()
    megatron.shut_down()


def _data_iterators(args: argparse.Namespace) -> tuple[Any, Any]:
    """Training and validation micro-batches; lists of them, one for each virtual stage, where there are such stages."""

    def build(vp_stage: int | None) -> tuple[Any, Any, Any]:
        provider = partial(train_valid_test_datasets, args, tokenizer=megatron.get_tokenizer(), vp_stage=vp_stage)
        provider.is_distributed = True  # type: ignore[attr-defined]
        return megatron.build_train_valid_test_data_iterators(provider)

    if args.virtual_pipeline_model_parallel_size is None:
        train, valid, _ = build(None)
        return train, valid
    stages = [build(vp_stage) for vp_stage in range(args.virtual_pipeline_model_parallel_size)]
    return [train for train, _, _ in stages], [valid for _, valid, _ in stages]


def _metrics(args: argparse.Namespace) -> Metrics:
    """The last rank logs: it is on the last stage, where the loss is, and it is where Megatron's users look."""
    speak = args.rank == args.world_size - 1
    file = None
    if speak and args.metrics_file:
        file = MetricsFile(args.metrics_file, args.iteration, {"arguments": _plain(args), "versions": versions()})
    return Metrics(
        scale=Scale(
            global_batch_size=args.global_batch_size,
            seq_length=args.seq_length,
            flops_per_batch=float(megatron.num_floating_point_operations(args, args.global_batch_size)),
            devices=args.world_size,
            train_iters=args.train_iters,
        ),
        first_iteration=args.iteration,
        metrics_file=file,
        writer=megatron.get_tensorboard_writer(),
        wandb=megatron.get_wandb_writer(),
        log_interval=args.log_interval,
        speak=speak,
    )


def _plain(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments as JSON values; what JSON does not have is written as text."""
    return {
        name: value if isinstance(value, bool | int | float | str | None) else str(value)
        for name, value in sorted(vars(args).items())
        if not name.startswith("_")
    }


def versions() -> dict[str, str]:
    """Versions that a figure depends on."""
    return {
        "megatron_async": megatron_async.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "megatron-core": version("megatron-core"),
        "emerging-optimizers": version("emerging-optimizers"),
    }
