# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Jobs about mixtures of experts for the worker pool."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np

from tests.distributed.jobs import BASE

Array = np.ndarray[Any, Any]


@dataclass
class Routing:
    """What happened to the routers of one rank, batch by batch.

    Attributes:
        rows: what the metrics file says about the batch; empty where it is not written.
        counts: tokens of each expert over all ranks, [layers, experts].
        biases: of the routers on this rank after the batch, by layer number.
        skipped: whether the batch had no update.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    counts: list[Array] = field(default_factory=list)
    biases: list[dict[int, Array]] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)


def train(arguments: Sequence[str], bad_batch: int = -1) -> Routing:
    """Train; in batch `bad_batch` the loss is not a number."""
    from megatron_async.config import arguments as command_line
    from megatron_async.training import run

    args = command_line.parse([*BASE, *arguments])
    routing = Routing()
    with _loss_that_is_no_number(bad_batch, args.global_batch_size // args.micro_batch_size // args.data_parallel_size):
        run.build(args, callbacks=[_watcher(routing)]).run()
    run.close()
    return routing


def _watcher(routing: Routing) -> Any:
    """A callback that notes in `routing` what routers do."""
    from megatron_async.training.callbacks import Callback, CompletedBatch

    class Watcher(Callback):
        def on_train_begin(self, loop: Any) -> None:
            self.routers, self.experts = _routers(loop.model), loop.args.num_experts
            self.batches: list[CompletedBatch] = []

        def on_batch_end(self, batch: CompletedBatch) -> None:
            routing.skipped.append(batch.skipped)
            routing.biases.append({layer: router.expert_bias.numpy().copy() for layer, router in self.routers.items()})
            self.batches.append(batch)

        def on_train_end(self, complete: bool) -> None:
            for batch in self.batches:
                (balance,) = (values for values in batch.pending if "moe_layers" in values.read())
                row: dict[str, Any] = {"iteration": batch.iteration, **balance.read()}
                sums = np.reshape(balance.fetch().read(), (len(row["moe_layers"]), -1))
                routing.counts.append(sums[:, -self.experts :])
                routing.rows.append(row)

    return Watcher()


def _routers(model: Sequence[Any]) -> dict[int, Any]:
    from megatron_async.models.naming import layer_number

    return {
        layer_number(module): module
        for chunk in model
        for module in chunk.modules()
        if getattr(module, "expert_bias", None) is not None
    }


@contextmanager
def _loss_that_is_no_number(bad_batch: int, microbatches: int) -> Iterator[None]:
    calls = 0

    def poisoned(total: Any) -> Any:
        nonlocal calls
        batch, calls = calls // microbatches, calls + 1
        return total * float("nan") if batch == bad_batch else total

    with _changed_loss(poisoned):
        yield


@contextmanager
def _changed_loss(change: Callable[[Any], Any]) -> Iterator[None]:
    from megatron_async.models import gpt

    original: Callable[..., Any] = gpt.loss

    def changed(*values: Any) -> Any:
        total, *others = original(*values)
        return (change(total), *others)

    gpt.loss = changed  # type: ignore[assignment]
    try:
        yield
    finally:
        gpt.loss = original


def updates_without_a_main_loss(arguments: Sequence[str]) -> dict[str, Array]:
    """By how much training changes each weight of this rank where the routers' losses are all there is."""
    from megatron.core.utils import unwrap_model

    from megatron_async.config import arguments as command_line
    from megatron_async.models.naming import global_names
    from megatron_async.training import run

    def weights() -> dict[str, Array]:
        chunks = unwrap_model(loop.model)
        return {name: param.detach().numpy().copy() for chunk in chunks for name, param in global_names(chunk)}

    with _changed_loss(lambda total: total * 0.0):
        loop = run.build(command_line.parse([*BASE, *arguments]))
        before = weights()
        loop.run()
        updates = {name: after - before[name] for name, after in weights().items()}
    run.close()
    return updates


@dataclass
class Experts:
    """Losses, and expert weights by name before and after training, of a run in which some experts are idle."""

    losses: list[float]
    before: dict[str, Array]
    after: dict[str, Array]


def train_with_idle_experts(arguments: Sequence[str]) -> Experts:
    """Train while every router sends all tokens to the first half of its experts; freed memory is not a number."""
    import torch
    from megatron.core.utils import unwrap_model

    from megatron_async.config import arguments as command_line
    from megatron_async.models.naming import global_names
    from megatron_async.training import run
    from megatron_async.training.callbacks import Callback, CompletedBatch
    from tests.distributed.jobs import Outcome, observer

    def experts() -> dict[str, Any]:
        chunks = unwrap_model(loop.model)
        return {name: param for chunk in chunks for name, param in global_names(chunk) if ".experts." in name}

    def copies() -> dict[str, Array]:
        return {name: param.detach().numpy().copy() for name, param in experts().items()}

    def one_sided(*values: Any, **options: Any) -> Any:
        """The biases must be there before the first weight version is noted."""
        model, *others = set_up(*values, **options)
        for router in _routers(model).values():
            router.expert_bias[: len(router.expert_bias) // 2] = 10.0
        return (model, *others)

    class Poison(Callback):
        def on_batch_end(self, batch: CompletedBatch) -> None:
            for size in (2**power for power in range(4, 16)):
                torch.full((size,), float("nan"))

    outcome, set_up = Outcome(), run.setup_model_and_optimizer
    with mock.patch.object(run, "setup_model_and_optimizer", one_sided):
        loop = run.build(command_line.parse([*BASE, *arguments]), callbacks=[observer(outcome), Poison()])
    before = copies()
    loop.run()
    found = Experts(outcome.losses, before, copies())
    run.close()
    return found
