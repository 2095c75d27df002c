# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Jobs for the worker pool that spoil a run on purpose."""

from collections.abc import Callable, Sequence
from typing import Any

from tests.distributed.jobs import Outcome, train


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
    from megatron_async import megatron

    optimizers = [inner.optimizer for inner in megatron.inner_optimizers(checkpoints._optimizer)]
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
    checkpoints._loaded = []


def _forget_newest_weights(checkpoints: Any) -> None:
    for chunk in checkpoints._model:
        for param in chunk.parameters():
            param.data.mul_(1.001)


def _forget_learning_rate(checkpoints: Any) -> None:
    checkpoints._scheduler.num_steps = 0
    checkpoints._scheduler.step(0)


def _forget_data_position(checkpoints: Any) -> None:
    checkpoints._args.consumed_train_samples = checkpoints._args.global_batch_size


def _forget_random_states(checkpoints: Any) -> None:
    from megatron_async import megatron

    tracker = megatron.tensor_parallel.get_cuda_rng_tracker()
    tracker.reset()
    megatron.tensor_parallel.model_parallel_cuda_manual_seed(checkpoints._args.seed)


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
