# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The state of a delayed run that a synchronous one does not have, in the form in which Megatron saves state.

Older weight versions are saved like the newest: as sharded tensors of the model with the prefix `older.<age>.`, age
in updates. The previous update of error feedback is part of the torch optimizer's state, like a momentum.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.utils import unwrap_model

from megatron_async.mcore.checkpoint import SHARDED_DATA
from megatron_async.mcore.optimizer import inner_optimizers
from megatron_async.mcore.parallel import device
from megatron_async.optim.corrections import PREVIOUS_UPDATE
from megatron_async.pipeline.steps import History


class NoHistory:
    """A synchronous run's: the newest weights are all there is."""

    depth = 0

    def showing(self, age: int) -> AbstractContextManager[None]:
        raise AssertionError("a synchronous run has no older weights")

    def fill(self) -> None:
        pass


class SavedChunk:
    """A model chunk with its older weight versions, in the place of the chunk in Megatron's save and load.

    Args:
        chunk: the wrapped model chunk.
        versions: number of older versions to be saved or loaded, the same on every rank.
        history: where they are; None while loading, when no schedule is set up yet.
    """

    def __init__(self, chunk: Any, versions: int, history: History | None = None) -> None:
        self._chunk, self._versions, self._history = chunk, versions, history
        self._older: dict[int, dict[str, torch.Tensor]] = {}

    def sharded_state_dict(self, metadata: dict[str, Any] | None = None) -> dict[str, Any]:
        """The chunk's own sharded state, and that of its older versions."""
        (inner,) = unwrap_model([self._chunk])
        state: dict[str, Any] = inner.sharded_state_dict(metadata=metadata)
        for age in range(1, self._versions + 1):
            with self._shown(age):
                older = {
                    name: item
                    for name, item in inner.sharded_state_dict(metadata=metadata).items()
                    if isinstance(item, SHARDED_DATA)
                }
                for item in older.values():
                    # Parameters are shown another version again after this block; their storage stays.
                    item.data = item.data.detach() if self._history else torch.empty_like(item.data)
            add_prefix_for_sharding(older, _prefix(age))
            state |= {_prefix(age) + name: item for name, item in older.items()}
        return state

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        """Load the newest weights into the chunk; keep the older ones for `restore`."""
        for age in range(1, self._versions + 1):
            prefix = _prefix(age)
            self._older[age] = {
                name.removeprefix(prefix): state.pop(name) for name in list(state) if name.startswith(prefix)
            }
        self._chunk.load_state_dict(state, strict=strict)

    def restore(self, history: History) -> None:
        """Put the loaded older versions where a schedule expects them. Missing ages: the oldest there is."""
        if history.depth == 0:
            return
        history.fill()
        (inner,) = unwrap_model([self._chunk])
        for age in range(1, history.depth + 1) if self._older else ():
            with history.showing(age):
                inner.load_state_dict(self._older[min(age, len(self._older))], strict=False)
        self._older.clear()

    def _shown(self, age: int) -> AbstractContextManager[None]:
        if self._history is None:
            return torch.no_grad()
        return self._history.showing(min(age, self._history.depth)) if self._history.depth else torch.no_grad()


def _prefix(age: int) -> str:
    return f"older.{age}."


def largest(number: int) -> int:
    """The largest of every rank's numbers. Collective."""
    values = torch.tensor([number], device=device())
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return int(values.item())


def complete_optimizer_state(optimizer: MegatronOptimizer) -> None:
    """Give every parameter the state that its optimizer's first step would give it, where it has none yet.

    A checkpoint describes the same tensors for all parameters, although a first step may have been skipped.
    """
    for inner in inner_optimizers(optimizer):
        fill = inner.init_state_fn or _fill_momentum
        inner.init_state_fn = fill
        fill(inner.optimizer, inner.config)
        if isinstance(inner.optimizer, torch.optim.Adam):  # AdamW is a subclass
            for state in _states(inner.optimizer):
                state.setdefault("step", torch.tensor(0.0))


def has_previous_update(optimizer: MegatronOptimizer) -> bool:
    """Whether corrections have left a previous update in the state of some parameter of this rank."""
    return any(PREVIOUS_UPDATE in state for inner in inner_optimizers(optimizer) for state in _states(inner.optimizer))


def expect_previous_update(optimizer: MegatronOptimizer) -> None:
    """Give every parameter a previous update: a checkpoint describes the same tensors for all.

    Zeros where there is none: to be loaded over, or for parameters without delay, which corrections leave alone.
    """
    for inner in inner_optimizers(optimizer):
        inner.extra_state_keys = (PREVIOUS_UPDATE,)
        for param in _params(inner.optimizer):
            inner.optimizer.state[param].setdefault(PREVIOUS_UPDATE, torch.zeros_like(param))


def _fill_momentum(optimizer: torch.optim.Optimizer, config: Any) -> None:
    """Megatron has no such function for SGD: a momentum of zeros gives the same first step as none."""
    for group in optimizer.param_groups:
        for param in group["params"] if group.get("momentum") else ():
            if optimizer.state[param].get("momentum_buffer") is None:
                optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)


def _params(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _states(optimizer: torch.optim.Optimizer) -> Iterator[dict[str, Any]]:
    for param in _params(optimizer):
        yield optimizer.state[param]
