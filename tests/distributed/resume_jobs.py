# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Jobs for the worker pool that spoil a run on purpose."""

import errno
import functools
import itertools
import json
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from tests.distributed.jobs import BASE, Outcome, observer, train


def resume_without(arguments: Sequence[str], piece: str) -> Outcome:
    """Resume as `train` does, with one piece of the loaded state left out."""
    from megatron_async.checkpoint.store import Checkpoints

    load = Checkpoints.load

    def incomplete(self: Checkpoints) -> None:
        load(self)
        PIECES[piece](self)

    Checkpoints.load = incomplete  # type: ignore[method-assign]
    try:
        return train(arguments)
    finally:
        Checkpoints.load = load  # type: ignore[method-assign]


def _states(checkpoints: Any) -> list[dict[str, Any]]:

    from megatron_async.mcore.optimizer import inner_optimizers

    optimizers = [inner.optimizer for inner in inner_optimizers(checkpoints._optimizer)]
    return [state for optimizer in optimizers for state in optimizer.state.values()]


def _drop(name: str) -> Callable[[Any], None]:
    def drop(checkpoints: Any) -> None:
        for state in _states(checkpoints):
            del state[name]

    return drop


def _zero(name: str) -> Callable[[Any], None]:
    def zero(checkpoints: Any) -> None:
        for state in _states(checkpoints):
            state[name].zero_()

    return zero


def _forget_older_weights(checkpoints: Any) -> None:
    checkpoints.restore = lambda histories: [history.fill() for history in histories if history.depth]


def _forget_newest_weights(checkpoints: Any) -> None:
    for chunk in checkpoints._model:
        for param in chunk.parameters():
            param.data.mul_(1.001)


def _forget_learning_rate(checkpoints: Any) -> None:
    checkpoints._scheduler.num_steps = 0
    checkpoints._scheduler.step(0)
    checkpoints.scheduler_steps = ()  # the same position, for each chunk


def _forget_data_position(checkpoints: Any) -> None:
    checkpoints._args.consumed_train_samples = checkpoints._args.global_batch_size


def _forget_random_states(checkpoints: Any) -> None:
    from megatron.core import tensor_parallel

    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.reset()
    tensor_parallel.model_parallel_cuda_manual_seed(checkpoints._args.seed)


def _forget_phase(checkpoints: Any) -> None:
    """The position in the schedule: corrections and synchronous phases go by the number of the batch."""
    checkpoints._args.sync_start_iters = checkpoints._args.iteration


PIECES: dict[str, Callable[[Any], None]] = {
    "newest weights": _forget_newest_weights,
    "older weights": _forget_older_weights,
    "first moment": _zero("exp_avg"),
    "second moment": _zero("exp_avg_sq"),
    "step count": _zero("step"),
    "previous update": _drop("previous_update"),
    "learning rate": _forget_learning_rate,
    "data position": _forget_data_position,
    "random states": _forget_random_states,
    "phase": _forget_phase,
}


def train_signaled(arguments: Sequence[str], signaled: int, moment: str) -> Outcome:
    """Train as `train` does, while rank `signaled` alone gets SIGTERM at a moment."""
    from megatron_async.config import arguments as command_line
    from megatron_async.training import run
    from megatron_async.training.signals import ALWAYS, StopRequests

    before = {number: signal.getsignal(number) for number in ALWAYS}
    outcome = Outcome()
    asker = [_asker(moment)] if int(os.environ["RANK"]) == signaled else []
    try:
        loop = run.build(
            command_line.parse([*BASE, *arguments]), StopRequests(ALWAYS), callbacks=[observer(outcome), *asker]
        )
        outcome.status = loop.run()
        run.close()
        return outcome
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ask() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _asker(moment: str) -> Any:
    """A callback that sends SIGTERM to its own process at a moment."""
    from megatron_async.training.callbacks import Callback, CompletedBatch

    class Asker(Callback):
        def on_train_begin(self, loop: Any) -> None:
            if moment == "start-up":
                _ask()

        def on_batch_end(self, batch: CompletedBatch) -> None:
            if moment == "training" and batch.iteration == 2:
                _ask()

        def on_evaluation_begin(self, iteration: int) -> None:
            if moment == "evaluation":
                _ask()

        def on_save_begin(self, iteration: int) -> None:
            if "save" in moment:
                _ask()

    return Asker()


def train_with_nan(arguments: Sequence[str], after_microbatches: int) -> str:
    """Train while every loss after so many micro-batches is not a number; what the run says in the end."""
    import torch

    from megatron_async.models import gpt
    from megatron_async.training import run
    from megatron_async.training.faults import TrainingFault

    loss, count = gpt.loss, itertools.count()

    def not_a_number(*args: Any) -> Any:
        total, tokens, report = loss(*args)
        factor = float("nan") if next(count) >= after_microbatches else 1.0
        summed, counted = report["lm loss"]
        return total * factor, tokens, {"lm loss": torch.stack([summed * factor, counted])}

    gpt.loss = not_a_number  # type: ignore[assignment]
    try:
        train(arguments)
    except TrainingFault as error:
        run.close()
        return str(error)
    finally:
        gpt.loss = loss
    return "finished"


def fault_of(arguments: Sequence[str]) -> str:
    """What a run says that ends with an error on every rank."""
    from megatron_async.training import run

    try:
        train(arguments)
    except RuntimeError as error:
        run.close()
        return str(error)
    return "finished"


def save_fails(arguments: Sequence[str], failing: int, place: str) -> str:
    """Train while writing fails on one rank (-1: on none) as if the disk were full; what every rank says."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async as _filesystem

    from megatron_async.checkpoint import manifest
    from megatron_async.checkpoint.agreement import JointError
    from megatron_async.training import run

    owner, name = {
        "tensors": (_filesystem, "_write_item"),
        "read back": (manifest, "measure"),
        "manifest": (manifest, "write"),
    }[place]
    original = getattr(owner, name)

    @functools.wraps(original)
    def no_space(*args: Any, **kwargs: Any) -> Any:
        # Reading back after a write forces the file to the disk first; reading for a load does not.
        if int(os.environ["RANK"]) == failing and kwargs.get("sync", place != "read back"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*args, **kwargs)

    try:
        with mock.patch.object(owner, name, no_space):
            train(arguments)
    except JointError as error:
        run.close()
        return str(error)
    return "saved"


def train_with_late_writes(arguments: Sequence[str]) -> Outcome:
    """Train as `train` does, while every checkpoint but the last is written after three more batches."""

    from megatron_async.mcore.checkpoint import CheckpointPart
    from megatron_async.mcore.training import get_args
    from megatron_async.training.callbacks import Callback, CompletedBatch

    completed = threading.Condition()
    latest = 0
    write = CheckpointPart.write

    class Counter(Callback):
        def on_batch_end(self, batch: CompletedBatch) -> None:
            nonlocal latest
            with completed:
                latest = batch.iteration
                completed.notify_all()

    def write_late(self: Any) -> Any:
        saved = latest
        with completed:
            last = saved == get_args().train_iters
            assert completed.wait_for(lambda: last or latest >= saved + 3, timeout=60), "training did not go on"
        return write(self)

    CheckpointPart.write = write_late  # type: ignore[method-assign]
    try:
        return train(arguments, callbacks=[Counter()])
    finally:
        CheckpointPart.write = write  # type: ignore[method-assign]


def save_fails_behind(arguments: Sequence[str], failing: int, place: str) -> tuple[str, int]:
    """As `save_fails`, and the iteration at which the run ended."""

    from megatron_async.mcore.training import get_args
    from megatron_async.training import run

    close, ended = run.close, []

    def note_and_close() -> None:
        ended.append(get_args().iteration)
        close()

    run.close = note_and_close
    try:
        return save_fails(arguments, failing, place), ended[0]
    finally:
        run.close = close


def die_while_writing(arguments: Sequence[str], victim: int) -> None:
    """Train; when a checkpoint has begun to be written and training goes on, one rank dies."""

    from megatron_async.mcore.checkpoint import CheckpointPart
    from megatron_async.training.callbacks import Callback, CompletedBatch

    writing, rank = threading.Event(), int(os.environ["RANK"])

    class Dying(Callback):
        def on_batch_end(self, batch: CompletedBatch) -> None:
            if rank == victim and writing.is_set() and batch.iteration > 4:
                os._exit(9)

    def write_for_ever(self: Any) -> Any:
        writing.set()
        time.sleep(600)

    if rank == victim:
        CheckpointPart.write = write_for_ever  # type: ignore[method-assign]
    train(arguments, callbacks=[Dying()])


def train_with_wandb(arguments: Sequence[str], record: str) -> Outcome:
    """Train with a wandb client that appends each call to a file: the run's id, and names and step of what is logged.

    Like the client, it takes the run's id from the environment, or makes one.
    """
    client, before = types.ModuleType("wandb"), sys.modules.get("wandb")
    environment = {name: os.environ.pop(name, None) for name in ("WANDB_RUN_ID", "WANDB_RESUME")}

    def note(**values: Any) -> None:
        with Path(record).open("a") as file:
            file.write(json.dumps(values | {"run": client.run.id}) + "\n")

    def init(**options: Any) -> None:
        client.run = types.SimpleNamespace(id=os.environ.get("WANDB_RUN_ID", f"{time.time_ns()}"))
        note(resume=os.environ.get("WANDB_RESUME"))

    client.init, client.finish = init, lambda: None
    client.log = lambda values, step: note(names=sorted(values), step=step)
    sys.modules["wandb"] = client
    try:
        return train(arguments)
    finally:
        sys.modules.pop("wandb")
        if before is not None:
            sys.modules["wandb"] = before
        for name, value in environment.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
