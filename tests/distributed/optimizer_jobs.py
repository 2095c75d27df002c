# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Jobs about optimizers for the worker pool."""

from collections.abc import Sequence
from typing import Any

import torch

from tests.distributed.jobs import BASE, Outcome, _observe, _stall, train


def problems(command_lines: Sequence[Sequence[str]]) -> list[list[str]]:
    """What is wrong with command lines of a two-stage run, one process being enough to say so."""
    from megatron_async.config import arguments

    found = []
    for extra in command_lines:
        try:
            arguments.parse([*BASE, *extra])
            found.append([])
        except arguments.ArgumentProblems as wrong:
            found.append(list(wrong.problems))
    return found


def train_in_parts(arguments: Sequence[str], part: int) -> Outcome:
    """`train`, with optimizer steps over parts of at most `part` elements."""
    from megatron_async.optim.corrections import pieces

    defaults = pieces.step_in_pieces.__defaults__
    pieces.step_in_pieces.__defaults__ = (pieces.PIECE, part)
    try:
        return train(arguments)
    finally:
        pieces.step_in_pieces.__defaults__ = defaults


def train_with_a_bad_gradient(
    arguments: Sequence[str], bad_batch: int, sleep_ms: float = 0.0
) -> tuple[Outcome, list[bool]]:
    """Train with a loss that is not a number in one batch; also, for each batch, whether its update left every tensor
    of the optimizers' state as it was. Before every action, sleep up to `sleep_ms`."""
    from megatron.core.utils import unwrap_model

    from megatron_async.config import arguments as command_line
    from megatron_async.mcore.optimizer import inner_optimizers
    from megatron_async.models import gpt
    from megatron_async.models.naming import global_names
    from megatron_async.training import run

    args = command_line.parse([*BASE, *arguments])
    microbatches = args.global_batch_size // args.micro_batch_size
    calls = 0
    original = gpt.loss

    def poisoned(*values: Any) -> Any:
        nonlocal calls
        total, *others = original(*values)
        batch, calls = calls // microbatches, calls + 1
        return (total * float("nan") if batch == bad_batch else total, *others)

    gpt.loss = poisoned
    try:
        loop, outcome = run.build(args), Outcome()
        _observe(loop, outcome)
        if sleep_ms:
            _stall(loop, sleep_ms)
        optimizer = loop._optimizer
        seen: list[torch.Tensor] = []
        unchanged: list[bool] = []
        batch_numbers = loop.metrics.batch

        def on_batch(numbers: Any) -> None:
            nonlocal seen
            state = [
                value.clone()
                for inner in inner_optimizers(optimizer)
                for tensors in inner.optimizer.state.values()
                for value in tensors.values()
                if isinstance(value, torch.Tensor)
            ]
            unchanged.append(len(state) == len(seen) and all(map(torch.equal, state, seen)))
            seen = state
            batch_numbers(numbers)

        loop.metrics.batch = on_batch
        loop.run()
        loop.metrics.close()
        for chunk in unwrap_model(loop.model):
            outcome.weights |= {name: param.detach().numpy().copy() for name, param in global_names(chunk)}
        run.close()
    finally:
        gpt.loss = original
    return outcome, unchanged


def gradient_norms_of_one_batch(arguments: Sequence[str]) -> list[float]:
    """Gradient norms of a run that sees the same micro-batch again and again."""
    from megatron_async.config import arguments as command_line
    from megatron_async.training import run

    outcome = Outcome()
    loop = run.build(command_line.parse([*BASE, *arguments]))
    _observe(loop, outcome)
    step = loop._forward_step
    batch_of, kept = step._batch, []

    def same(*values: Any) -> Any:
        if not kept:
            kept.append(batch_of(*values))
        return dict(kept[0])

    step._batch = same
    loop.run()
    loop.metrics.close()
    run.close()
    return outcome.grad_norms


def parameter_groups(arguments: Sequence[str]) -> list[tuple[str, int, dict[str, Any]]]:
    """Class, number of parameters and settings of every group of this rank's optimizers, as they are stepped with."""

    from megatron_async.config import arguments as command_line
    from megatron_async.mcore.optimizer import inner_optimizers
    from megatron_async.training import run

    loop = run.build(command_line.parse([*BASE, *arguments]))
    groups = [
        (
            type(inner.optimizer).__name__,
            len(group["params"]),
            {name: value for name, value in group.items() if isinstance(value, bool | int | float | tuple)},
        )
        for inner in inner_optimizers(loop._optimizer)
        for group in inner.optimizer.param_groups
    ]
    loop.metrics.close()
    run.close()
    return groups
