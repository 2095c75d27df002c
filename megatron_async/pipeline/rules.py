# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Rules for pipeline schedules: layout, batch, and Megatron features that a delay excludes."""

import argparse
import math
import os
from collections.abc import Iterator
from contextlib import suppress

from megatron_async.mcore.batch_sizes import BatchSizes
from megatron_async.mcore.model import layers_by_part
from megatron_async.platform import gpu
from megatron_async.schedules.arguments import is_delayed, schedule_of


def problems(args: argparse.Namespace) -> Iterator[str]:
    """Problems with parsed values."""
    yield from _layout(args)
    if is_delayed(args):
        yield from _unsupported_with_delay(args)
    yield from _hardware_queues(args)


def derived_problems(args: argparse.Namespace) -> Iterator[str]:
    """Problems with values that Megatron has derived: data-parallel size, number of micro-batches."""
    for _, size in BatchSizes.of(args).steps:
        yield from _batch(args, size)


def _batch(args: argparse.Namespace, size: int) -> Iterator[str]:
    """Problems with a batch of `size` samples."""
    per_step = args.micro_batch_size * args.data_parallel_size
    microbatches, stages = size // per_step, args.pipeline_model_parallel_size
    definition = schedule_of(args)
    if definition.update_per_microbatch and microbatches != 1:
        yield (
            f"--pipeline-schedule {definition.name} updates after every micro-batch, so a batch is one micro-batch: "
            f"--global-batch-size must be --micro-batch-size {args.micro_batch_size} x data-parallel size "
            f"{args.data_parallel_size} = {per_step}, not {size}."
        )
    least = definition.least_microbatches(stages)
    if microbatches < least:
        yield (
            f"--pipeline-schedule {args.pipeline_schedule} needs at least {least} micro-batches per batch: "
            f"{microbatches} micro-batches (global batch {size} / micro-batch {args.micro_batch_size} / data-parallel "
            f"{args.data_parallel_size}) for {stages} stages. Raise --global-batch-size to at least "
            f"{least * per_step}, lower --micro-batch-size or the data-parallel size, or use fewer stages."
        )


def _layout(args: argparse.Namespace) -> Iterator[str]:
    stages = args.pipeline_model_parallel_size
    definition = schedule_of(args)
    if definition.delayed and stages < 2:
        yield (
            f"--pipeline-schedule {args.pipeline_schedule} needs at least 2 pipeline stages, "
            f"--pipeline-model-parallel-size is {stages}. Raise it, or use --gradient-delay 1 to emulate the delay in "
            "one process."
        )
    chunks = definition.chunks * stages
    if args.num_layers is not None and args.num_layers % chunks != 0 and not _uneven(args):
        yield (
            f"--num-layers {args.num_layers} cannot be split evenly over --pipeline-model-parallel-size {stages}"
            f"{f' with {definition.chunks} virtual stages each' if chunks != stages else ''}. "
            "Change one of them, or take an uneven split: --pipeline-balance auto, "
            "--decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers or "
            "--pipeline-model-parallel-layout."
        )
    layout = args.pipeline_model_parallel_layout
    with suppress(AssertionError):  # the rules of the model name an unknown letter
        if definition.delayed and layout is not None and (parts := len(layers_by_part(layout))) != chunks:
            yield (
                f"--pipeline-model-parallel-layout {layout} has {parts} parts. --pipeline-schedule {definition.name} "
                f"needs {definition.chunks} for each of {stages} stages = {chunks}. Change the layout or "
                "--pipeline-model-parallel-size."
            )
    pattern = args.hybrid_layer_pattern
    ends = [position for position, letter in enumerate(pattern or "") if letter == "|"]
    if pattern is not None and (chunks > stages or "|" in pattern) and (parts := pattern.count("|") + 1) != chunks:
        yield (
            f"--hybrid-layer-pattern {pattern} has {parts} stage(s), ends at positions {ends or 'none'}. "
            f"--pipeline-schedule {definition.name} needs "
            f"{definition.chunks} for each of --pipeline-model-parallel-size {stages} = {chunks}. Separate them with |."
        )
    wrong = list(_processes(args))
    yield from wrong or _whole_microbatches(args)


def _whole_microbatches(args: argparse.Namespace) -> Iterator[str]:
    """Every batch, of training and of an evaluation, is whole micro-batches on every data-parallel rank."""
    parts = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    data_parallel = args.world_size // parts
    batch, microbatch = ("--global-batch-size", args.global_batch_size), ("--micro-batch-size", args.micro_batch_size)
    pairs = [((batch[0], size), microbatch) for _, size in BatchSizes.of(args).steps]
    if args.eval_global_batch_size or args.eval_micro_batch_size:  # those of training where one is not given
        of_evaluation = ("--eval-global-batch-size", args.eval_global_batch_size)
        smaller = ("--eval-micro-batch-size", args.eval_micro_batch_size)
        pairs.append((of_evaluation if of_evaluation[1] else batch, smaller if smaller[1] else microbatch))
    for (batch_flag, size), (flag, samples) in pairs:
        step = (samples or 0) * data_parallel
        if size and step > 0 and size % step:
            below = size // step * step
            fitting = f"{below} or {below + step}" if below else str(step)
            yield (
                f"{batch_flag} {size} is not a multiple of {flag} {samples} x data-parallel size {data_parallel} = "
                f"{step}. Take {fitting}, another {flag}, or another number of processes."
            )


def _processes(args: argparse.Namespace) -> Iterator[str]:
    """The number of processes is a multiple of those that hold the model, and of those that hold its experts."""
    tensor = args.tensor_model_parallel_size
    stages = {"--pipeline-model-parallel-size": args.pipeline_model_parallel_size}
    layouts = [
        {"--tensor-model-parallel-size": tensor, **stages, "--context-parallel-size": args.context_parallel_size}
    ]
    if args.num_experts is not None:
        experts = {"--expert-model-parallel-size": args.expert_model_parallel_size}
        layouts += [{"--expert-tensor-parallel-size": args.expert_tensor_parallel_size or tensor, **stages, **experts}]
    for sizes in layouts:
        product = math.prod(sizes.values())
        if product < 1 or args.world_size % product != 0:
            terms = " x ".join(f"{flag} {size}" for flag, size in sizes.items())
            yield (
                f"{args.world_size} process(es) cannot be divided among {terms} = {product}. Start a multiple of "
                f"{product} processes (torchrun --nproc-per-node), or change a parallel size."
            )


def _hardware_queues(args: argparse.Namespace) -> Iterator[str]:
    """A delayed schedule launches receives, sends and updates before they can run (docs/gpu.md)."""
    queues = os.environ.get(gpu.QUEUES, "8")
    if args.device == "cuda" and not args.dry_run and schedule_of(args).delayed and int(queues) < gpu.MOST_QUEUES:
        yield (
            f"{gpu.QUEUES}={queues}: --pipeline-schedule {args.pipeline_schedule} needs {gpu.MOST_QUEUES} hardware "
            "queues, one for each stream. In a shared one, a message or an update that waits holds up the compute "
            f"behind it: the run is slow, or hangs. Unset {gpu.QUEUES}; Megatron's own schedule alone needs 1, for "
            "tensor parallelism before Blackwell."
        )


def _uneven(args: argparse.Namespace) -> bool:
    return any(
        (
            args.decoder_first_pipeline_num_layers,
            args.decoder_last_pipeline_num_layers,
            args.pipeline_model_parallel_layout,
            args.hybrid_layer_pattern is not None and "|" in args.hybrid_layer_pattern,
            args.account_for_embedding_in_pipeline_split,
            args.account_for_loss_in_pipeline_split,
        )
    )


def _unsupported_with_delay(args: argparse.Namespace) -> Iterator[str]:
    """Megatron features that the schedule does not cover: refused, since they would run silently wrong."""
    definition = schedule_of(args)
    schedule = (
        "--gradient-delay" if args.gradient_delay is not None else f"--pipeline-schedule {args.pipeline_schedule}"
    )
    if not definition.tied_embeddings and not args.untie_embeddings_and_output_weights:
        yield (
            f"not supported with {schedule}: tied embeddings: the input embedding and the head have different delays; "
            "add --untie-embeddings-and-output-weights."
        )
    features = {
        "experts": ("--num-experts", args.num_experts is not None),
        "distributed optimizer": ("--use-distributed-optimizer", args.use_distributed_optimizer),
        "per-token loss": ("--calculate-per-token-loss", args.calculate_per_token_loss),
    }
    for feature, reason in definition.unsupported.items():
        flag, given = features[feature]
        if given:
            yield f"not supported with {schedule}: {flag}: {reason}."
