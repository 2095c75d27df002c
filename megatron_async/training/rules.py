# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Checks of the phases, the learning rate and traces."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from megatron_async.files import obstacle
from megatron_async.schedules import is_delayed


def problems(args: argparse.Namespace) -> Iterator[str]:
    """Problems with parsed values."""
    yield from _phases(args)
    if args.manual_gc_interval < 0:
        yield f"--manual-gc-interval {args.manual_gc_interval}: must be at least 0; 0 is never."
    if (args.manual_gc_interval or not args.manual_gc_eval) and not args.manual_gc:
        yield "--manual-gc-interval and --no-manual-gc-eval without --manual-gc would be ignored: add --manual-gc."
    yield from _batch_sizes(args)
    yield from _logs(args)
    if args.trace_batches < 1:
        yield f"--trace-batches {args.trace_batches}: must be at least 1."


def derived_problems(args: argparse.Namespace) -> Iterator[str]:
    """Problems with values that Megatron has derived."""
    yield from _learning_rate(args)
    if args.train_iters is not None and args.sync_start_iters + args.sync_cooldown_iters > args.train_iters:
        yield (
            f"--sync-start-iters {args.sync_start_iters} + --sync-cooldown-iters {args.sync_cooldown_iters} is more "
            f"than --train-iters {args.train_iters}."
        )


def _phases(args: argparse.Namespace) -> Iterator[str]:
    phases = {"--sync-start-iters": args.sync_start_iters, "--sync-cooldown-iters": args.sync_cooldown_iters}
    for flag, value in phases.items():
        if value < 0:
            yield f"{flag} {value}: must be at least 0."
        if value > 0 and not is_delayed(args):
            yield (
                f"{flag} {value} needs a gradient delay, but --pipeline-schedule 1f1b has none. Use "
                "--pipeline-schedule 2bw (or --gradient-delay), or leave it out."
            )


def _logs(args: argparse.Namespace) -> Iterator[str]:
    for flag, file in (("--metrics-file", args.metrics_file), ("--trace-file", args.trace_file)):
        if file and not args.dry_run and (reason := obstacle(Path(file))):
            yield f"{flag} {file}: {reason}. Give the path of a file in a folder that can be written to."
    if args.profile and args.profile_step_start >= args.profile_step_end:
        yield (
            f"--profile-step-start {args.profile_step_start} must be less than --profile-step-end "
            f"{args.profile_step_end}: batches from the first up to the second, counted from 0, are profiled."
        )
    if args.profile and not args.use_pytorch_profiler and args.device == "cpu":
        yield "--profile on CPUs: windows for Nsight Systems need CUDA. Add --use-pytorch-profiler for Chrome traces."
    if not args.profile and args.use_pytorch_profiler:
        yield "--use-pytorch-profiler without --profile would be ignored: give --profile."
    hashes = args.check_weight_hash_across_dp_replicas_interval
    if hashes is not None and hashes < 1:
        yield f"--check-weight-hash-across-dp-replicas-interval {hashes}: must be at least 1."
    if args.log_params_norm and args.freeze_all_layers:
        yield "--log-params-norm with --freeze-all-layers: the norm is of the optimizer's weights, which has none."
    if args.log_progress and not args.save:
        yield "--log-progress writes to progress.txt in the folder of --save: name one."


def _batch_sizes(args: argparse.Namespace) -> Iterator[str]:
    if args.step_batch_size_schedule is None:
        return
    if args.train_samples is None and not args.skip_train:
        yield (
            "--step-batch-size-schedule and --rampup-batch-size need a run that is counted in samples: give "
            "--train-samples instead of --train-iters, and learning-rate options in samples."
        )
    sizes = [size for _, size in args.batch_size_steps]
    if sizes != sorted(sizes):
        yield f"--step-batch-size-schedule {args.step_batch_size_schedule}: batches must not become smaller."


def _learning_rate(args: argparse.Namespace) -> Iterator[str]:
    decay = args.lr_decay_iters or args.train_iters
    if decay is not None and args.lr_warmup_iters and args.lr_warmup_iters >= decay:
        yield (
            f"--lr-warmup-iters {args.lr_warmup_iters} must be less than "
            f"{'--lr-decay-iters' if args.lr_decay_iters else '--train-iters'} {decay}."
        )
