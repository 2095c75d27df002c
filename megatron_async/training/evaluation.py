# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Evaluations: losses of validation sets and of the test set, on every layout. They end early if the run is to end."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_async.checkpoint.state import largest
from megatron_async.data.iterators import EvaluationSet
from megatron_async.mcore.arguments import overridden
from megatron_async.mcore.parallel import device
from megatron_async.mcore.rng import fork_rng


class GivenUp(Exception):
    """A rank wants to end the run; raised on every rank."""


def mean_loss(
    args: argparse.Namespace,
    model: Sequence[Any],
    forward_step: Any,
    part: EvaluationSet,
    wants_stop: Callable[[], bool],
) -> float | None:
    """Token-weighted mean loss of one evaluation with the weights in use; training goes on as if it had not happened.

    Args:
        args: Megatron's arguments and ours.
        model: wrapped model chunks of this rank.
        forward_step: Megatron's forward step function.
        part: the data.
        wants_stop: whether this rank wants to end the run.

    Returns:
        The loss, None on ranks that do not know it. Collective.

    Raises:
        GivenUp: before the last batch, a rank wanted to end the run.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=device())
    # Forward steps read the micro-batch size from the arguments.
    with _evaluating(model), overridden(args, micro_batch_size=args.eval_micro_batch_size):
        for batch in range(part.batches):
            if batch and largest(wants_stop()):
                raise GivenUp
            losses = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=part.data if len(model) > 1 else part.data[0],
                model=list(model),
                num_microbatches=args.eval_global_batch_size // (args.micro_batch_size * args.data_parallel_size),
                seq_length=args.seq_length,
                micro_batch_size=args.micro_batch_size,
                decoder_seq_length=args.decoder_seq_length,
                forward_only=True,
            )
            for microbatch in losses:
                sums += microbatch["lm loss"].view(-1).double()
    if not mpu.is_pipeline_last_stage(ignore_virtual=True):
        return None
    dist.all_reduce(sums, group=mpu.get_data_parallel_group(with_context_parallel=True))
    total, tokens = sums.tolist()
    return total / tokens if tokens else 0.0


@contextmanager
def _evaluating(model: Sequence[Any]) -> Iterator[None]:
    """Without gradients and dropout; random states are restored."""
    for chunk in model:
        chunk.eval()
    try:
        with torch.no_grad(), fork_rng():
            yield
    finally:
        for chunk in model:
            chunk.train()
