# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Defaults of a dry run for arguments that a real run must give, and values that follow from arguments."""

import argparse
import math
import os

from megatron_async.optim import options, registry
from megatron_async.optim.hyperparameters import Hyperparameters
from megatron_async.schedules.arguments import schedule_of


def complete(args: argparse.Namespace) -> None:
    """Set missing arguments before Megatron's checks and note each choice for the output.

    `WORLD_SIZE` is the number of devices; without it, the smallest job of the layout is planned.
    """
    notes = []
    model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    experts = (args.expert_tensor_parallel_size or args.tensor_model_parallel_size) * args.expert_model_parallel_size
    if "WORLD_SIZE" not in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
        smallest = model * experts // math.gcd(experts, args.tensor_model_parallel_size)
        if args.world_size % smallest:
            args.world_size = smallest
    args.rank = 0
    replicas = max(1, args.world_size // max(1, model))
    if args.micro_batch_size is None:
        args.micro_batch_size = 1
        notes.append("--micro-batch-size was not given: 1")
    if args.global_batch_size is None:
        per_step = args.micro_batch_size * replicas
        pipelined = 1 if schedule_of(args).update_per_microbatch else 2 * args.pipeline_model_parallel_size
        args.global_batch_size = per_step * pipelined
        notes.append(
            f"--global-batch-size was not given: {args.global_batch_size}, {pipelined} micro-batches per pipeline"
        )
    if args.vocab_size is None and args.padded_vocab_size is None:
        args.vocab_size = args.make_vocab_size_divisible_by
        notes.append(f"--vocab-size was not given and no tokenizer is read: {args.vocab_size}")
    args.dry_run_notes = notes


def pad_vocabulary(args: argparse.Namespace) -> None:
    """Set the vocabulary size that Megatron would train with."""
    if args.padded_vocab_size is None:
        multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
        args.padded_vocab_size = math.ceil(args.vocab_size / multiple) * multiple


def microbatches_of(args: argparse.Namespace) -> int:
    """Micro-batches of a batch and pipeline."""
    microbatches: int = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    return microbatches


def owners_of(args: argparse.Namespace) -> tuple[int, int]:
    """Ranks that share the optimizer state of a parameter, and of an expert."""
    if not (args.use_distributed_optimizer or args.use_layer_wise_distributed_optimizer):
        return 1, 1
    return copies_of(args)


def copies_of(args: argparse.Namespace) -> tuple[int, int]:
    """Ranks that hold the same parameter, and the same expert."""
    experts = args.expert_tensor_parallel_size * args.expert_model_parallel_size * args.pipeline_model_parallel_size
    return args.data_parallel_size, args.world_size // experts


def width_of(args: argparse.Namespace) -> int:
    """Bytes of a weight or an activation."""
    return 2 if args.bf16 or args.fp16 else 4


def precision_of(args: argparse.Namespace) -> str:
    """Precision of the products, as devices name it; fp16 is as fast as bf16."""
    return "bf16" if width_of(args) == 2 else "fp32"


def key_value_heads(args: argparse.Namespace) -> int:
    """Heads of keys and values; Megatron's --num-query-groups is 1 where it is not in use."""
    heads: int = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    return heads


def keeps_scores(args: argparse.Namespace) -> bool:
    """Whether attention is Megatron's local one, which computes and keeps all scores.

    A plan for a GPU that is made on a machine without one assumes the GPU's attention.
    """
    return args.transformer_impl == "local" and (args.device == "cuda" or args.plan_device == "cpu")


def step_values(args: argparse.Namespace, optimizer: str) -> Hyperparameters:
    """Hyper-parameters of an optimizer on the planned device, except the learning rate.

    A plan for a GPU that is made on a machine without one leaves the CPU's default precision of products out.
    """
    values = options.hyperparameters(args, optimizer) | {"lr": 0.0}
    if args.device == "cpu" and args.plan_device != "cpu" and values.get("fp32_matmul_prec") == "highest":
        del values["fp32_matmul_prec"]
    return registry.find(optimizer).hyperparameters(**values)
