# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""What a command line must satisfy; each rule that is broken gives one line with the numbers and the way out."""

import argparse
import math
from collections.abc import Iterator

from megatron_async.checkpoint import compatibility
from megatron_async.config import model_rules
from megatron_async.data.blend import missing_data_files
from megatron_async.mcore.training import gpt_config_from_args
from megatron_async.reference import delay as oracle
from megatron_async.schedules import SCHEDULES
from megatron_async.training.emulation import EmulatedCompute


def is_delayed(args: argparse.Namespace) -> bool:
    """Whether gradients are taken at older weights than the update is applied to."""
    return args.pipeline_schedule != "1f1b" or args.gradient_delay is not None


def before_megatron(args: argparse.Namespace) -> list[str]:
    """Problems that show in the parsed values alone."""
    problems = [
        *_correction(args),
        *_ablations(args),
        *_phases(args),
        *_oracle(args),
        *_layout(args),
        *model_rules.problems(args),
        *compatibility.interval(args),
    ]
    if not args.dry_run:
        problems += missing_data_files(args)
    if args.trace_batches < 1:
        problems.append(f"--trace-batches {args.trace_batches}: must be at least 1.")
    if is_delayed(args):
        problems += _unsupported_with_delay(args)
    problems += _emulation(args)
    return problems


def after_megatron(args: argparse.Namespace) -> list[str]:
    """Problems that need Megatron's derived values: data-parallel size, batch sizes, the model's configuration."""
    problems = [*_batch(args), *_learning_rate(args), *compatibility.problems(args)]
    if args.train_iters is not None and args.sync_start_iters + args.sync_cooldown_iters > args.train_iters:
        problems.append(
            f"--sync-start-iters {args.sync_start_iters} + --sync-cooldown-iters {args.sync_cooldown_iters} is more "
            f"than --train-iters {args.train_iters}."
        )
    try:
        gpt_config_from_args(_with_vocabulary(args)).finalize()
    except (AssertionError, ValueError, TypeError, RuntimeError) as error:
        problems.append(str(error))
    return problems


def _correction(args: argparse.Namespace) -> Iterator[str]:
    if not math.isfinite(args.correction_strength) or args.correction_strength < 0:
        yield f"--correction-strength {args.correction_strength}: must be a finite number, at least 0."
    if args.correction_strength != 1.0 and args.staleness_correction == "none":
        yield "--correction-strength without --staleness-correction would be ignored: name a correction."
    if args.staleness_correction != "none" and not is_delayed(args):
        yield (
            f"--staleness-correction {args.staleness_correction} corrects one-step-old gradients, but "
            "--pipeline-schedule 1f1b has none. Use --pipeline-schedule 2bw (or --gradient-delay), or leave the "
            "correction out."
        )


def _ablations(args: argparse.Namespace) -> Iterator[str]:
    numbered = args.gradient_delay is not None and args.gradient_delay.isdecimal()
    if args.undelayed_head and not numbered:
        yield (
            f"--undelayed-head takes the head out of the delay of --gradient-delay N; --gradient-delay is "
            f"{args.gradient_delay}. Give a number, or leave it out."
        )
    if args.delay_first_moment_only and (not numbered or args.optimizer != "adam" or args.optimizer_for):
        yield (
            "--delay-first-moment-only needs --gradient-delay N and --optimizer adam for every parameter; "
            f"--gradient-delay is {args.gradient_delay}, --optimizer {args.optimizer}."
        )
    if args.log_update_statistics < 0:
        yield f"--log-update-statistics {args.log_update_statistics}: must be at least 0; 0 is never."
    twice = args.delay_first_moment_only or args.log_update_statistics > 0
    if twice and args.gradient_delay is not None and args.num_experts is not None:
        yield (
            "--delay-first-moment-only and, with --gradient-delay, --log-update-statistics compute every batch twice, "
            f"which would count the load of --num-experts {args.num_experts} experts twice. Leave them out, or use a "
            "dense model."
        )


def _phases(args: argparse.Namespace) -> Iterator[str]:
    for flag, value in (
        ("--sync-start-iters", args.sync_start_iters),
        ("--sync-cooldown-iters", args.sync_cooldown_iters),
    ):
        if value < 0:
            yield f"{flag} {value}: must be at least 0."
        if value > 0 and not is_delayed(args):
            yield (
                f"{flag} {value} switches a delay off for a while, but --pipeline-schedule 1f1b has none. Use "
                "--pipeline-schedule 2bw (or --gradient-delay), or leave it out."
            )


def _oracle(args: argparse.Namespace) -> Iterator[str]:
    if args.gradient_delay is None:
        return
    if (objection := oracle.problem(args.gradient_delay, args.num_layers)) is not None:
        yield objection
    if not args.gradient_delay.isdecimal() and args.world_size > 1:
        yield (
            f"--gradient-delay {args.gradient_delay} clips by group and runs in one process; {args.world_size} were "
            "started."
        )
    stages = args.pipeline_model_parallel_size
    if stages != 1 or args.pipeline_schedule != "1f1b":
        yield (
            f"--gradient-delay emulates a delay without a pipeline, but --pipeline-model-parallel-size is {stages} "
            f"and --pipeline-schedule is {args.pipeline_schedule}. Use one pipeline stage and leave "
            "--pipeline-schedule out."
        )


def _emulation(args: argparse.Namespace) -> Iterator[str]:
    if args.emulate_compute_ms is None:
        return
    try:
        EmulatedCompute.parse(args.emulate_compute_ms)
    except ValueError as error:
        yield f"--emulate-compute-ms {error}."
    if args.num_experts is not None:
        yield "--emulate-compute-ms with --num-experts: no router runs, so nothing is balanced; use a dense model."


def _layout(args: argparse.Namespace) -> Iterator[str]:
    stages = args.pipeline_model_parallel_size
    if args.pipeline_schedule != "1f1b" and stages < 2:
        yield (
            f"--pipeline-schedule {args.pipeline_schedule} needs at least 2 pipeline stages, "
            f"--pipeline-model-parallel-size is {stages}. Raise it, or use --gradient-delay 1 to emulate the delay in "
            "one process."
        )
    chunks = 2 * stages if args.pipeline_schedule == "wpipe" else stages
    if args.num_layers is not None and args.num_layers % chunks != 0 and not _uneven(args):
        yield (
            f"--num-layers {args.num_layers} cannot be split evenly over --pipeline-model-parallel-size {stages}"
            f"{' with two virtual stages each' if chunks != stages else ''}. "
            "Change one of them, or give an uneven split (--decoder-first-pipeline-num-layers, "
            "--decoder-last-pipeline-num-layers or --pipeline-model-parallel-layout)."
        )
    sizes = {
        "--tensor-model-parallel-size": args.tensor_model_parallel_size,
        "--pipeline-model-parallel-size": stages,
        "--context-parallel-size": args.context_parallel_size,
    }
    product = math.prod(sizes.values())
    if product < 1 or args.world_size % product != 0:
        terms = " x ".join(f"{flag} {size}" for flag, size in sizes.items())
        yield (
            f"{args.world_size} process(es) cannot be divided among {terms} = {product}. Start a multiple of {product} "
            "processes (torchrun --nproc-per-node), or change a parallel size."
        )


def _uneven(args: argparse.Namespace) -> bool:
    return any(
        (
            args.decoder_first_pipeline_num_layers,
            args.decoder_last_pipeline_num_layers,
            args.pipeline_model_parallel_layout,
            args.account_for_embedding_in_pipeline_split,
            args.account_for_loss_in_pipeline_split,
        )
    )


def _batch(args: argparse.Namespace) -> Iterator[str]:
    per_step = args.micro_batch_size * args.data_parallel_size
    if args.global_batch_size % per_step != 0:
        yield (
            f"--global-batch-size {args.global_batch_size} is not a multiple of --micro-batch-size "
            f"{args.micro_batch_size} x data-parallel size {args.data_parallel_size} = {per_step}."
        )
    microbatches, stages = args.global_batch_size // per_step, args.pipeline_model_parallel_size
    if args.pipeline_schedule == "pipedream" and microbatches != 1:
        yield (
            "--pipeline-schedule pipedream updates after every micro-batch, so a batch is one micro-batch: "
            f"--global-batch-size must be --micro-batch-size {args.micro_batch_size} x data-parallel size "
            f"{args.data_parallel_size} = {per_step}, not {args.global_batch_size}."
        )
    least = SCHEDULES[args.pipeline_schedule].least_microbatches(stages)
    if microbatches < least:
        yield (
            f"--pipeline-schedule {args.pipeline_schedule} needs at least {least} micro-batches per batch: "
            f"{microbatches} micro-batches (global batch {args.global_batch_size} / micro-batch "
            f"{args.micro_batch_size} / data-parallel {args.data_parallel_size}) for {stages} stages. Raise "
            f"--global-batch-size to at least {least * per_step}, lower --micro-batch-size or the data-parallel size, "
            "or use fewer stages."
        )


def _learning_rate(args: argparse.Namespace) -> Iterator[str]:
    decay = args.lr_decay_iters or args.train_iters
    if decay is not None and args.lr_warmup_iters and args.lr_warmup_iters >= decay:
        yield (
            f"--lr-warmup-iters {args.lr_warmup_iters} leaves nothing to decay over: it must be less than "
            f"{'--lr-decay-iters' if args.lr_decay_iters else '--train-iters'} {decay}."
        )


def _unsupported_with_delay(args: argparse.Namespace) -> Iterator[str]:
    """Megatron features that the delayed schedules do not cover: refused, since they would run silently wrong."""
    virtual = args.num_layers_per_virtual_pipeline_stage is not None or (
        args.num_virtual_stages_per_pipeline_rank not in ((2,) if args.pipeline_schedule == "wpipe" else (None,))
    )
    balancing = args.moe_router_load_balancing_type
    rules = {
        "--fp16: its dynamic loss scale decides about a step after later forwards have run; use --bf16": args.fp16,
        "FSDP: weights are gathered for each use, so two versions cannot be kept; use data parallelism": (
            args.use_megatron_fsdp or args.use_torch_fsdp2
        ),
        "interleaved virtual stages: there is no bubble for them to shrink (wpipe makes its own two); leave them out": (
            virtual
        ),
        "--mtp-num-layers: untested, its gradients have a norm of their own; leave it out": args.mtp_num_layers
        is not None,
        f"--context-parallel-size {args.context_parallel_size}: untested; use 1": args.context_parallel_size > 1,
        f"--moe-router-load-balancing-type {balancing}: it carries statistics from one micro-batch to the next, and "
        "micro-batches of two batches are in flight; use aux_loss or seq_aux_loss": (
            "global_aux_loss" in balancing or "quantile_balancing" in balancing
        ),
        "FP8 and FP4: untested; use --bf16": args.fp8 is not None or args.fp4 is not None,
        "a changing batch size: every batch must have the same number of micro-batches; give a constant "
        "--global-batch-size": args.rampup_batch_size is not None or args.step_batch_size_schedule is not None,
        "--train-samples: give --train-iters": args.train_samples is not None,
        "--optimizer-cpu-offload: untested; leave it out": args.optimizer_cpu_offload,
        "--overlap-param-gather: the schedule itself publishes new weights; leave it out": args.overlap_param_gather,
        f"--num-distributed-optimizer-instances {args.num_distributed_optimizer_instances}: untested; use 1": (
            args.num_distributed_optimizer_instances > 1
        ),
        "CUDA graphs: a graph holds fixed weight addresses, a delayed schedule switches them; leave them out": (
            args.cuda_graph_impl != "none"
        ),
    }
    if args.pipeline_schedule == "wpipe":
        rules[
            "tied embeddings: the input embedding is delayed and the head is not; add "
            "--untie-embeddings-and-output-weights"
        ] = not args.untie_embeddings_and_output_weights
    if args.pipeline_schedule == "pipedream":
        rules[
            "tied embeddings: first and last stage have different delays; add --untie-embeddings-and-output-weights"
        ] = not args.untie_embeddings_and_output_weights
        rules["--num-experts: untested; use a dense model"] = args.num_experts is not None
        rules["--use-distributed-optimizer: untested; leave it out"] = args.use_distributed_optimizer
        rules[
            "--calculate-per-token-loss: an update follows every micro-batch, before the batch's number of tokens is "
            "known; leave it out"
        ] = args.calculate_per_token_loss
    schedule = (
        "--gradient-delay" if args.gradient_delay is not None else f"--pipeline-schedule {args.pipeline_schedule}"
    )
    for rule, broken in rules.items():
        if broken:
            yield f"not supported with {schedule}: {rule}."


def _with_vocabulary(args: argparse.Namespace) -> argparse.Namespace:
    """A copy with some vocabulary size: the tokenizer, which knows the true one, is not built yet."""
    copy = argparse.Namespace(**vars(args))
    if copy.vocab_size is None and getattr(copy, "padded_vocab_size", None) is None:
        copy.vocab_size = copy.make_vocab_size_divisible_by
    return copy
