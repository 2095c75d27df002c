# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Builds a run from checked arguments: process groups, model, optimizer, data, callbacks."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.core import mpu
from megatron.core.utils import get_model_config

from megatron_async.checkpoint.manifest import arguments_as_json
from megatron_async.checkpoint.state import largest
from megatron_async.checkpoint.store import Checkpoints
from megatron_async.data.iterators import RunData, run_data
from megatron_async.mcore.arguments import overridden
from megatron_async.mcore.batch_sizes import BatchSizes
from megatron_async.mcore.build import setup_model_and_optimizer
from megatron_async.mcore.model import tied_copies_differ
from megatron_async.mcore.optimizer import inner_optimizers
from megatron_async.mcore.parallel import device, initialize, shut_down
from megatron_async.mcore.rng import fork_rng
from megatron_async.mcore.training import (
    get_tokenizer,
    get_wandb_writer,
    num_floating_point_operations,
    pretrain_cfg_container_from_args,
    set_global_variables,
    set_wandb_writer,
    update_train_iters,
)
from megatron_async.models import gpt
from megatron_async.optim import corrections, ownership, setup, totals
from megatron_async.optim.param_groups import MATRIX_ROLES
from megatron_async.optim.statistics import UpdateStatistics
from megatron_async.pipeline.delayed import DelayedSteps
from megatron_async.pipeline.steps import Steps, Training
from megatron_async.pipeline.synchronous import SynchronousSteps
from megatron_async.planning import balance, measure
from megatron_async.platform import gpu, packages
from megatron_async.platform.groups import group_of_all
from megatron_async.reference import steps as reference
from megatron_async.schedules.arguments import is_delayed, schedule_of
from megatron_async.training import writers
from megatron_async.training.callbacks import Callback
from megatron_async.training.collector import EmptyCache, ManualCollection
from megatron_async.training.evaluation import GivenUp, mean_loss
from megatron_async.training.expert_balance import ExpertBalance
from megatron_async.training.faults import EqualReplicas, FirstLoss, SkippedUpdates, StopOnRequest, TrainingFault
from megatron_async.training.last_actions import LastActions
from megatron_async.training.log import Log, MetricsFile, ProgressFile
from megatron_async.training.loop import Loop, Trained
from megatron_async.training.metrics import Metrics
from megatron_async.training.profiling import MemoryHistory, Profiler, TraceFile
from megatron_async.training.provenance import versions
from megatron_async.training.signals import ENDED_UNSAVED, FINISHED, StopRequests
from megatron_async.training.stage_balance import Expected
from megatron_async.training.values import Logged, PeriodicTimes, requested


def pretrain(args: argparse.Namespace, stops: StopRequests, callbacks: Sequence[Callback] = ()) -> int:
    """Train a GPT, or with `--skip-train` evaluate it; return the exit status. See `build`."""
    status = evaluate(args, stops, callbacks) if args.skip_train else build(args, stops, callbacks).run()
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
    vocabulary, expected = _start(args)
    trained = _trained(args, vocabulary)
    checkpoints = Checkpoints(args, trained.model, trained.optimizer, trained.scheduler, versions())
    checkpoints.prepare()
    checkpoints.load()
    if args.perform_initialization and largest(tied_copies_differ(trained.model)):
        raise TrainingFault(
            "the first and the last stage begin with unequal copies of the tied embedding: they would train different "
            "models"
        )
    data = data_iterators(args)
    staleness: dict[int, Mapping[str, float]] = {}  # by batch
    forward_step = forward_step or gpt.ForwardStep(args, vocabulary)
    stops = stops or StopRequests(minutes=args.exit_duration_in_mins)
    return Loop(
        args=args,
        trained=trained,
        make_steps=partial(_make_steps, staleness),
        forward_step=forward_step,
        data=data,
        checkpoints=checkpoints,
        callbacks=[
            Logged(lambda batch: staleness.pop(batch.number, None)),
            *_callbacks(args, trained, stops, expected),
            *callbacks,
            *_metrics(args),
            *([Profiler(args)] if args.profile else []),
        ],
    )


def evaluate(args: argparse.Namespace, stops: StopRequests, callbacks: Sequence[Callback] = ()) -> int:
    """Evaluate a checkpoint on the validation and test sets, without optimizer and training data."""
    args.no_load_rng = True
    vocabulary, _ = _start(args)
    model, _, _ = _model(args, vocabulary)
    Checkpoints(args, model, None, None, versions()).load()
    data = data_iterators(args)
    forward_step, callbacks = gpt.ForwardStep(args, vocabulary), [*callbacks, *_metrics(args)]
    status = FINISHED
    try:
        for part in (*data.valid, *data.test):
            loss = mean_loss(args, model, forward_step, part, lambda: stops.requested)
            for callback in callbacks:
                callback.on_evaluated(args.iteration, part.name, loss)
    except GivenUp:
        status = ENDED_UNSAVED
    for callback in callbacks:
        callback.on_train_end(True)
    return status


def _start(args: argparse.Namespace) -> tuple[int, Expected | None]:
    """Make process groups and Megatron's global state; return the size of the vocabulary, and what is expected of the
    stages. Collective."""
    _adjust(args)
    if args.device == "cuda":
        gpu.record_flights(args)
    with overridden(args, tensorboard_dir=None, wandb_project=""):
        set_global_variables(args)
    set_wandb_writer(writers.wandb(args))
    balance.finish(args)  # the tokenizer knows the size of the vocabulary
    measured = measure.Measured(args) if args.pipeline_balance == "measured" else None
    expected = None if args.skip_train else Expected.of(args)
    initialize(args)
    if measured is not None:
        measured.settle()
    if args.rank == 0:
        off = packages.messages() if args.device == "cuda" else []
        lines = (args.device_sentence, *off, *getattr(args, "_balance", ()))
        print("\n".join(f"> {line}" for line in lines), flush=True)
    # Saved with the arguments in every checkpoint, for exports: rows of embeddings, and the token that ends documents.
    args.tokenizer_vocab_size = int(get_tokenizer().vocab_size)
    args.tokenizer_end = getattr(get_tokenizer(), "eod", None)
    return int(args.tokenizer_vocab_size), expected


def _adjust(args: argparse.Namespace) -> None:
    """Switch off what this loop replaces or does not need."""
    args.enable_one_logger = False  # NVIDIA's own service; this loop reports nothing to it
    args.exit_signal_handler = False  # Megatron's handler would take the place of this loop's
    args.exit_signal_handler_for_training = False
    args.use_persistent_ckpt_worker = False  # Megatron would start a process that this loop gives nothing to do
    args.rerun_mode = "disabled"  # Megatron's data iterators would keep all micro-batches
    if not schedule_of(args).megatron:
        args.overlap_grad_reduce = False  # the schedule reduces gradients itself
    if is_delayed(args) or args.skip_train:
        args.overlap_param_gather = False  # one version of the weights, without an optimizer the same ones
    if not args.reset_attention_mask:
        args.create_attention_mask_in_dataloader = False  # [sequence, sequence]; attention makes a causal mask itself
    args.check_for_nan_in_loss_and_grad = False  # updates with such gradients are skipped and counted


def _model(args: argparse.Namespace, vocabulary: int) -> tuple[list[Any], Any, Any]:
    """Set up model chunks, optimizer and scheduler; the last two are None with `--skip-train`. Collective."""
    container = pretrain_cfg_container_from_args(args, gpt.model_config(args, vocabulary))
    optimizers = setup.optimizers(args)
    return setup_model_and_optimizer(container, optimizers, one_per_chunk=schedule_of(args).chunks > 1)


def _trained(args: argparse.Namespace, vocabulary: int) -> Trained:
    """Set up model, optimizer and scheduler. Collective."""
    by_chunk = schedule_of(args).chunks > 1
    model, optimizer, scheduler = _model(args, vocabulary)
    update_train_iters(args)
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
        correction=corrections.make(
            args.staleness_correction,
            args.correction_strength,
            [inner.optimizer for inner in inner_optimizers(optimizer)],
        ),
        statistics=statistics,
        zeros=totals.GradientZeros(totals.shares(optimizer), device()) if args.log_num_zeros_in_grad else None,
    )


def _make_steps(staleness: dict[int, Mapping[str, float]], training: Training) -> Steps:
    args = training.args
    if not schedule_of(args).megatron:
        return DelayedSteps(training, newest_version=args.iteration)
    if args.gradient_delay is None:
        return SynchronousSteps(training)
    return reference.make_steps(training, staleness.__setitem__)


def _callbacks(
    args: argparse.Namespace, trained: Trained, stops: StopRequests, expected: Expected | None
) -> Iterator[Callback]:
    """All callbacks but the log. Collective."""
    if args.world_size > 1:
        yield LastActions(60 * args.distributed_timeout_minutes)
    config = get_model_config(trained.model[0])
    if config.num_moe_experts is not None and config.cuda_graph_impl == "none":  # CUDA graphs skip hooks
        yield ExpertBalance(args, config, trained.model)
    yield from requested(args, trained)
    yield FirstLoss()
    if args.check_weight_hash_across_dp_replicas_interval is not None:
        yield EqualReplicas(args.check_weight_hash_across_dp_replicas_interval)
    if expected is not None:
        yield PeriodicTimes(args.log_stage_balance, partial(expected.reduce, group_of_all("stage balance")))
    yield SkippedUpdates(args.max_consecutive_skips, BatchSizes.of(args))
    yield StopOnRequest(stops)
    if args.log_progress and args.rank == 0:
        yield ProgressFile(_flops_of_batch(args) / args.global_batch_size)
    if args.record_memory_history and args.rank == args.world_size - 1:
        yield MemoryHistory(args)
    if args.manual_gc:
        yield ManualCollection(args)
    if args.empty_unused_memory_level:
        yield EmptyCache(args)
    if args.trace_file:
        yield TraceFile()


def _flops_of_batch(args: argparse.Namespace) -> float:
    return float(num_floating_point_operations(args, args.global_batch_size))


def close() -> None:
    """Close the writers, the process groups and Megatron's global state."""
    if (wandb := get_wandb_writer()) is not None:
        wandb.finish()
    dist.barrier()
    shut_down()


def data_iterators(args: argparse.Namespace) -> RunData:
    """The data of a run at its position. Collective."""
    with fork_rng():  # data loaders draw seeds
        return run_data(args, get_tokenizer())


def _metrics(args: argparse.Namespace) -> Iterator[Callback]:
    """Metrics, and the log of the last rank: it knows the loss."""
    log = None
    if args.rank == args.world_size - 1:
        config = {"arguments": arguments_as_json(args), "versions": versions()}
        # An evaluation alone adds to the file of a run that may have gone further.
        completed = sys.maxsize if args.skip_train else args.iteration
        complete = completed == args.train_iters
        file = MetricsFile(args.metrics_file, completed, config, complete=complete) if args.metrics_file else None
        log = Log(args, metrics_file=file, writer=writers.tensorboard(args), wandb=get_wandb_writer())
    group = mpu.get_data_parallel_group(with_context_parallel=True)
    yield Metrics(args, flops=_flops_of_batch(args), group=group, log=log)
    if log is not None:
        yield log
