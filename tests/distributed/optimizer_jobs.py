# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Jobs about optimizers for the worker pool."""

from collections.abc import Sequence
from itertools import repeat
from typing import Any

import torch

from tests.distributed.jobs import BASE, Outcome, changed_data, observer, staller, train, weights_of


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


def fresh_and_stale(arguments: Sequence[str]) -> list[tuple[float, float]]:
    """Norms of the fresh and of the delayed gradient of each batch of an oracle's run."""
    from unittest import mock

    from megatron_async.reference import steps

    compare, norms = steps.staleness, []

    def noted(optimizer: Any, stale: Any, fresh: Any) -> Any:
        norms.append(tuple(float(sum(x.square().sum() for x in found.values())) for found in (fresh, stale)))
        return compare(optimizer, stale, fresh)

    with mock.patch.object(steps, "staleness", noted):
        train([*arguments, "--log-update-statistics", "1"])
    return norms


def train_with_a_bad_gradient(
    arguments: Sequence[str], bad_batch: int, sleep_ms: float = 0.0
) -> tuple[Outcome, list[bool]]:
    """Train with a loss that is not a number in one batch; also, for each batch, whether its update left every tensor
    of the optimizers' state as it was. Before every action, sleep up to `sleep_ms`."""
    from megatron_async.config import arguments as command_line
    from megatron_async.mcore.optimizer import inner_optimizers
    from megatron_async.models import gpt
    from megatron_async.training import run
    from megatron_async.training.callbacks import Callback, CompletedBatch

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
        unchanged: list[bool] = []

        class StateWatcher(Callback):
            seen: list[torch.Tensor]

            def on_train_begin(self, loop: Any) -> None:
                self.seen, self.optimizer = [], loop.optimizer

            def on_batch_end(self, batch: CompletedBatch) -> None:
                state = [
                    value.clone()
                    for inner in inner_optimizers(self.optimizer)
                    for tensors in inner.optimizer.state.values()
                    for value in tensors.values()
                    if isinstance(value, torch.Tensor)
                ]
                unchanged.append(len(state) == len(self.seen) and all(map(torch.equal, state, self.seen)))
                self.seen = state

        outcome = Outcome()
        callbacks = [observer(outcome), StateWatcher(), *([staller(sleep_ms)] if sleep_ms else [])]
        loop = run.build(args, callbacks=callbacks)
        loop.run()
        outcome.weights = weights_of(loop.model)
        run.close()
    finally:
        gpt.loss = original
    return outcome, unchanged


def gradient_norms_of_one_batch(arguments: Sequence[str]) -> list[float]:
    """Gradient norms of a run that sees the same micro-batch again and again."""
    with changed_data(lambda data: repeat(next(data))):
        return train(arguments).grad_norms


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
        for inner in inner_optimizers(loop.optimizer)
        for group in inner.optimizer.param_groups
    ]
    loop.end()
    run.close()
    return groups


def train_with_a_registered_optimizer(arguments: Sequence[str]) -> tuple[Outcome, list[str]]:
    """`train` with an optimizer that this file registers; also what is wrong with its options out of range."""
    from tests.distributed import toy_optimizer

    toy_optimizer.add()
    return train(["--optimizer", "toy", *arguments]), problems([["--optimizer", "toy", "--toy-bound", "-1"]])[0]


def state_bytes(arguments: Sequence[str]) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of optimizer state (with master weights) and of the correction's buffers on this rank: allocated by a run
    of three batches, and planned by a dry run of its stage."""
    from megatron.core import mpu

    from megatron_async.config import arguments as command_line
    from megatron_async.mcore.optimizer import master_params
    from megatron_async.optim.corrections import PREVIOUS_UPDATE
    from megatron_async.planning.estimate import plan
    from megatron_async.training import run

    line = [*BASE, *arguments, "--train-iters", "3"]
    args = command_line.parse(line)
    loop = run.build(args)
    loop.run()
    held = {"optimizer_state": 0, "correction": 0}
    for optimizer, _, param in master_params(loop.optimizer):
        held["optimizer_state"] += 4 * param.numel() if args.bf16 else 0
        for name, value in optimizer.state[param].items():
            if isinstance(value, torch.Tensor) and value.ndim > 0:
                kind = "correction" if name == PREVIOUS_UPDATE else "optimizer_state"
                held[kind] += value.numel() * value.element_size()
    stage = mpu.get_pipeline_model_parallel_rank()
    run.close()
    planned = plan(command_line.parse([*line, "--dry-run"])).bytes_by_kind[stage]
    return held, {kind: planned[kind] for kind in held}


def gathers(arguments: Sequence[str]) -> tuple[Outcome, int]:
    """Train; also count the gathers of weights that were started and not waited for."""
    from unittest import mock

    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    start, started = _ParamAndGradBucketGroup.start_param_sync, 0

    def counted(group: Any, force_sync: bool = False) -> None:
        nonlocal started
        start(group, force_sync)
        started += group.param_gather_handle is not None

    with mock.patch.object(_ParamAndGradBucketGroup, "start_param_sync", counted):
        return train(arguments), started
