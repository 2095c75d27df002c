# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""From checked arguments to a finished run: Megatron's building blocks in order."""

import argparse
import contextlib
import os
import platform
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config

import megatron_async
from megatron_async.checkpoint import compatibility, folder
from megatron_async.checkpoint.agreement import JointError
from megatron_async.checkpoint.store import Checkpoints
from megatron_async.data.datasets import train_valid_test_datasets
from megatron_async.mcore.build import complete_layer_wise, one_optimizer_per_chunk, setup_model_and_optimizer
from megatron_async.mcore.parallel import initialize, shut_down, undisturbed_random_states
from megatron_async.mcore.training import (
    build_train_valid_test_data_iterators,
    get_tensorboard_writer,
    get_tokenizer,
    get_wandb_writer,
    num_floating_point_operations,
    pretrain_cfg_container_from_args,
    set_global_variables,
    update_train_iters,
)
from megatron_async.models import gpt
from megatron_async.optim import registry
from megatron_async.training import trace
from megatron_async.training.emulation import EmulatedCompute, EmulatedForwardStep
from megatron_async.training.faults import TooManySkips
from megatron_async.training.loop import Loop
from megatron_async.training.metrics import Metrics, MetricsFile, Scale
from megatron_async.training.signals import StopRequests
from megatron_async.training.steps import activations


def pretrain(args: argparse.Namespace, stops: StopRequests) -> int:
    """Train a GPT as `args` says, from process groups to their end; return the exit status."""
    loop = build(args, stops)
    try:
        status = loop.run()
        if args.trace_file:
            trace.write(args.trace_file, loop.timeline, emulated_compute_ms=args.emulate_compute_ms)
    except (JointError, TooManySkips):  # of every rank, between batches: all numbers will come
        loop.metrics.close()
        raise
    except BaseException:
        loop.metrics.close(wait=False)
        raise
    loop.metrics.close()
    stops.ignore()
    close()
    return status


def build(args: argparse.Namespace, stops: StopRequests | None = None) -> Loop:
    """Process groups, model, optimizer, data and log of a run, ready to start."""
    _continue_wandb(args)
    # This loop never repeats a batch to look for faults of the hardware; Megatron's data iterators would keep every
    # micro-batch of the run for that.
    args.rerun_mode = "disabled"
    set_global_variables(args)
    initialize(args)
    if args.pipeline_schedule != "1f1b":
        # The schedule reduces gradients itself, behind the next batch; Megatron's overlap would do it a second time.
        args.overlap_grad_reduce = False
    # A gradient that is not finite is skipped and counted, under every schedule alike; Megatron's own check would
    # stop the run from inside the reduction.
    args.check_for_nan_in_loss_and_grad = False
    if args.rank == 0:
        print(f"> {args.device_sentence}", flush=True)
        if args.emulate_compute_ms is not None:
            print(f"> EMULATED COMPUTE: stages sleep {args.emulate_compute_ms} ms; losses mean nothing", flush=True)
    update_train_iters(args)
    registry.register(args)
    # Kept with the arguments in every checkpoint: exported tables have as many rows.
    vocabulary = args.tokenizer_vocab_size = int(get_tokenizer().vocab_size)
    container = pretrain_cfg_container_from_args(args, gpt.model_config(args, vocabulary))
    with one_optimizer_per_chunk() if args.pipeline_schedule == "wpipe" else contextlib.nullcontext():
        model, optimizer, scheduler = setup_model_and_optimizer(container)
    complete_layer_wise(optimizer, container.optimizer)
    registry.finish(args, model, optimizer)
    checkpoints = Checkpoints(args, model, optimizer, scheduler, versions())
    checkpoints.prepare()
    checkpoints.load()
    with undisturbed_random_states():  # loaders draw from the training's generators
        train_data, valid_data = _data_iterators(args)
    return Loop(
        args=args,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        forward_step=_forward_step(args, model, vocabulary),
        train_data=train_data,
        valid_data=valid_data,
        checkpoints=checkpoints,
        stops=stops or StopRequests(minutes=args.exit_duration_in_mins),
        metrics=_metrics(args),
    )


def _forward_step(args: argparse.Namespace, model: list[Any], vocabulary: int) -> Any:
    if args.emulate_compute_ms is None:
        return gpt.ForwardStep(args, vocabulary)
    message = activations(args, get_model_config(model[0]))
    return EmulatedForwardStep(
        EmulatedCompute.parse(args.emulate_compute_ms), chunks=len(model), shape=message.shape, dtype=args.params_dtype
    )


def close() -> None:
    """End a run in this process: its writers, process groups and Megatron's global state."""
    if (wandb := get_wandb_writer()) is not None:
        wandb.finish()
    dist.barrier()
    shut_down()


class _Undisturbing:
    """An iterator whose items are drawn without touching torch's generator: a loader takes seeds from it."""

    def __init__(self, data: Iterator[Any]) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        before = torch.get_rng_state()
        item = next(self._data)
        torch.set_rng_state(before)
        return item


def _continue_wandb(args: argparse.Namespace) -> None:
    """Go on with the wandb run whose id is in the checkpoint, unless the user names one."""
    found = folder.newest(Path(args.load)) if args.load and args.wandb_project else None
    if found is not None and found.manifest is not None and found.manifest.wandb_run:
        os.environ.setdefault("WANDB_RUN_ID", found.manifest.wandb_run)
        os.environ.setdefault("WANDB_RESUME", "allow")


def _data_iterators(args: argparse.Namespace) -> tuple[Any, Any]:
    """Training and validation micro-batches; lists of them, one for each virtual stage, where there are such stages."""

    def build(vp_stage: int | None) -> tuple[Any, Any, Any]:
        provider = partial(train_valid_test_datasets, args, tokenizer=get_tokenizer(), vp_stage=vp_stage)
        provider.is_distributed = True  # type: ignore[attr-defined]
        iterators = build_train_valid_test_data_iterators(provider)
        return tuple(None if data is None else _Undisturbing(data) for data in iterators)  # type: ignore[return-value]

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
        config = {"arguments": compatibility.arguments_as_json(args), "versions": versions()}
        if args.emulate_compute_ms is not None:
            config["emulated_compute_ms"] = args.emulate_compute_ms
        file = MetricsFile(args.metrics_file, args.iteration, config)
    return Metrics(
        scale=Scale(
            global_batch_size=args.global_batch_size,
            seq_length=args.seq_length,
            flops_per_batch=float(num_floating_point_operations(args, args.global_batch_size)),
            devices=args.world_size,
            train_iters=args.train_iters,
        ),
        first_iteration=args.iteration,
        metrics_file=file,
        writer=get_tensorboard_writer(),
        wandb=get_wandb_writer(),
        log_interval=args.log_interval,
        log_layers=args.moe_per_layer_logging,
        speak=speak,
    )


def versions() -> dict[str, str]:
    """Versions that a figure depends on."""
    return {
        "megatron_async": megatron_async.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "megatron-core": version("megatron-core"),
        "emerging-optimizers": version("emerging-optimizers"),
    }
