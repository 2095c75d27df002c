# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Builds a run from checked arguments: process groups, model, optimizer, data, callbacks."""

import argparse
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import mpu
from megatron.core.utils import get_model_config

from megatron_async import reference
from megatron_async.checkpoint import folder
from megatron_async.checkpoint.manifest import arguments_as_json
from megatron_async.checkpoint.store import Checkpoints
from megatron_async.data.datasets import train_valid_test_datasets
from megatron_async.mcore.build import setup_model_and_optimizer
from megatron_async.mcore.optimizer import inner_optimizers
from megatron_async.mcore.parallel import device, initialize, shut_down
from megatron_async.mcore.rng import fork_rng
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
from megatron_async.optim import corrections, ownership, setup
from megatron_async.optim.param_groups import MATRIX_ROLES
from megatron_async.optim.qk_clip import watches_logits
from megatron_async.optim.statistics import UpdateStatistics
from megatron_async.pipeline.delayed import DelayedSteps
from megatron_async.pipeline.steps import Steps, Training
from megatron_async.pipeline.synchronous import SynchronousSteps
from megatron_async.platform import gpu, packages
from megatron_async.platform.groups import group_of_all
from megatron_async.schedules.arguments import schedule_of
from megatron_async.training import expert_balance
from megatron_async.training.callbacks import Callback
from megatron_async.training.faults import SkippedUpdates, StopOnRequest
from megatron_async.training.last_actions import LastActions
from megatron_async.training.log import Log, MetricsFile
from megatron_async.training.loop import Loop, Trained
from megatron_async.training.metrics import LargestLogit, Metrics
from megatron_async.training.provenance import versions
from megatron_async.training.signals import StopRequests
from megatron_async.training.statistics import StalenessValues, StatisticsValues
from megatron_async.training.trace import TraceFile


def pretrain(args: argparse.Namespace, stops: StopRequests, callbacks: Sequence[Callback] = ()) -> int:
    """Train a GPT; return the exit status. See `build`."""
    status = build(args, stops, callbacks).run()
    stops.ignore()
    close()
    return status


def build(
    args: argparse.Namespace,
    stops: StopRequests | None = None,
    callbacks: Sequence[Callback] = (),
    forward_step: Any = None,
) -> Loop:
    """Set up a run.

    Args:
        args: checked arguments.
        stops: requests to end early; None for the time limit of `args` only.
        callbacks: further callbacks. They precede the log, so they may add values to a batch.
        forward_step: Megatron's forward step function; None for a GPT.
    """
    _continue_wandb(args)
    _adjust(args)
    if args.device == "cuda":
        gpu.record_flights(args)
    set_global_variables(args)
    initialize(args)
    if args.rank == 0:
        off = packages.messages() if args.device == "cuda" else []
        print("\n".join(f"> {line}" for line in (args.device_sentence, *off)), flush=True)
    update_train_iters(args)
    # Saved with the arguments in every checkpoint: the number of rows of exported embeddings.
    vocabulary = args.tokenizer_vocab_size = int(get_tokenizer().vocab_size)
    trained = _trained(args, vocabulary)
    checkpoints = Checkpoints(args, trained.model, trained.optimizer, trained.scheduler, versions())
    checkpoints.prepare()
    checkpoints.load()
    with fork_rng():  # data loaders draw seeds
        train_data, valid_data = data_iterators(args)
    staleness = StalenessValues()
    forward_step = forward_step or gpt.ForwardStep(args, vocabulary)
    stops = stops or StopRequests(minutes=args.exit_duration_in_mins)
    return Loop(
        args=args,
        trained=trained,
        make_steps=partial(_make_steps, staleness),
        forward_step=forward_step,
        train_data=train_data,
        valid_data=valid_data,
        checkpoints=checkpoints,
        callbacks=[*_callbacks(args, trained, staleness, stops), *callbacks, _metrics(args)],
    )


def _adjust(args: argparse.Namespace) -> None:
    """Switch off what this loop replaces or does not need."""
    args.rerun_mode = "disabled"  # Megatron's data iterators would keep all micro-batches
    if not schedule_of(args).megatron:
        args.overlap_grad_reduce = False  # the schedule reduces gradients itself
    if not args.reset_attention_mask:
        args.create_attention_mask_in_dataloader = False  # [sequence, sequence]; attention makes a causal mask itself
    args.check_for_nan_in_loss_and_grad = False  # updates with such gradients are skipped and counted


def _trained(args: argparse.Namespace, vocabulary: int) -> Trained:
    """Set up model, optimizer and scheduler. Collective."""
    container = pretrain_cfg_container_from_args(args, gpt.model_config(args, vocabulary))
    by_chunk = schedule_of(args).chunks > 1
    model, optimizer, scheduler = setup_model_and_optimizer(container, setup.optimizers(args), one_per_chunk=by_chunk)
    for inner in inner_optimizers(optimizer):
        inner.config.timers = None  # at --timing-log-level 1 they hold a barrier over all ranks, between polls
    setup.finish(args, model, optimizer)
    statistics, roles = None, ownership.roles_of_masters(model, optimizer)
    if args.correct_matrices_only:
        corrections.leave_out(master for master, role in roles.items() if role not in MATRIX_ROLES)
    if args.log_update_statistics:
        statistics = UpdateStatistics(args.log_update_statistics, roles, group_of_all("statistics"), device())
    return Trained(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        optimizers=list(optimizer.chained_optimizers) if by_chunk else [optimizer],
        correction=corrections.make(args.staleness_correction, args.correction_strength, optimizer),
        statistics=statistics,
    )


def _make_steps(staleness: StalenessValues, training: Training) -> Steps:
    args = training.args
    if not schedule_of(args).megatron:
        return DelayedSteps(training, newest_version=args.iteration)
    if args.gradient_delay is None:
        return SynchronousSteps(training)
    return reference.make_steps(training, staleness)


def _callbacks(
    args: argparse.Namespace, trained: Trained, staleness: StalenessValues, stops: StopRequests
) -> Iterator[Callback]:
    """All callbacks but the log. Collective."""
    if args.world_size > 1:
        yield LastActions(60 * args.distributed_timeout_minutes)
    if (balance := expert_balance.make(get_model_config(trained.model[0]), trained.model)) is not None:
        yield balance
    if trained.statistics is not None:
        yield StatisticsValues(trained.statistics)
    yield staleness
    if watches_logits(args):
        yield LargestLogit(group_of_all("largest logit"))
    yield SkippedUpdates(args.max_consecutive_skips, args.global_batch_size)
    yield StopOnRequest(stops)
    if args.trace_file:
        yield TraceFile()


def close() -> None:
    """Close the writers, the process groups and Megatron's global state."""
    if (wandb := get_wandb_writer()) is not None:
        wandb.finish()
    dist.barrier()
    shut_down()


class _Undisturbing:
    """A data iterator that preserves the RNG states, from which loaders draw seeds."""

    def __init__(self, data: Iterator[Any]) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with fork_rng():
            return next(self._data)


def _continue_wandb(args: argparse.Namespace) -> None:
    """Resume the wandb run of the checkpoint, unless the user names another one."""
    found = folder.newest(Path(args.load)) if args.load and args.wandb_project else None
    if found is not None and found.manifest is not None and found.manifest.wandb_run:
        os.environ.setdefault("WANDB_RUN_ID", found.manifest.wandb_run)
        os.environ.setdefault("WANDB_RESUME", "allow")


def data_iterators(args: argparse.Namespace) -> tuple[Any, Any]:
    """Iterators over training and validation micro-batches; with virtual stages a list of them."""

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
    """The last rank logs, as in Megatron: it knows the loss."""
    log = None
    if args.rank == args.world_size - 1:
        config = {"arguments": arguments_as_json(args), "versions": versions()}
        file = MetricsFile(args.metrics_file, args.iteration, config) if args.metrics_file else None
        log = Log(args, metrics_file=file, writer=get_tensorboard_writer(), wandb=get_wandb_writer())
    flops = float(num_floating_point_operations(args, args.global_batch_size))
    return Metrics(args, flops=flops, group=mpu.get_data_parallel_group(with_context_parallel=True), log=log)
