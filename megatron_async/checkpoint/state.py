# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Older weight versions of a delayed run, in the form in which Megatron saves a model.

They are saved like the newest: as sharded tensors of the model with the prefix `older.<age>.`, age in updates.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.utils import unwrap_model

from megatron_async.mcore.checkpoint import SHARDED_DATA, sharded_state
from megatron_async.mcore.model import layers_of_gpt_layer
from megatron_async.mcore.parallel import device
from megatron_async.pipeline.steps import History


class SavedChunk:
    """A model chunk with its older weight versions; Megatron's save and load take it for the chunk.

    Args:
        chunk: the wrapped model chunk.
        versions: number of older versions to save or load, the same on every rank.
        history: the versions; None while loading, before there is a schedule, and for a synchronous run.
    """

    def __init__(self, chunk: Any, versions: int, history: History | None = None) -> None:
        self._chunk, self._versions, self._history = chunk, versions, history
        self._older: dict[int, dict[str, torch.Tensor]] = {}

    @property
    def module(self) -> Any:
        """The chunk, by whose class Megatron tells a HybridModel's checkpoints from a GPT's: hidden where a HybridModel
        has the names of a GPT."""
        (inner,) = unwrap_model([self._chunk])
        return self._chunk if layers_of_gpt_layer(inner.config) == 1 else None

    def sharded_state_dict(self, metadata: dict[str, Any] | None = None) -> dict[str, Any]:
        """The chunk's own sharded state, and that of its older versions."""
        (inner,) = unwrap_model([self._chunk])
        state = sharded_state(inner, metadata)
        for age in range(1, self._versions + 1):
            with self._showing(age):
                items = sharded_state(inner, metadata).items()
                older = {name: item for name, item in items if isinstance(item, SHARDED_DATA)}
                for item in older.values():
                    # Parameters show another version after this block; the storage of this one stays.
                    item.data = item.data.detach() if self._history else torch.empty_like(item.data)
            add_prefix_for_sharding(older, prefix := f"older.{age}.")
            state |= {prefix + name: item for name, item in older.items()}
        return state

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        """Load the newest weights into the chunk; keep the older ones for `restore`.

        Megatron calls this a second time, with the same state and not strictly, where the first one fails: layers of
        Transformer Engine have extra state.
        """
        newest = dict(state)
        for age in range(1, self._versions + 1):
            prefix = f"older.{age}."
            names = [name for name in newest if name.startswith(prefix)]
            self._older[age] = {name.removeprefix(prefix): newest.pop(name) for name in names}
        self._chunk.load_state_dict(newest, strict=strict)

    def restore(self, history: History) -> None:
        """Copy the loaded older versions into a schedule's history; for missing ages, the oldest there is."""
        if history.depth == 0:
            return
        history.fill()
        (inner,) = unwrap_model([self._chunk])
        for age in range(1, history.depth + 1) if self._older else ():
            with history.showing(age):
                inner.load_state_dict(self._older[min(age, len(self._older))], strict=False)
        self._older.clear()

    def _showing(self, age: int) -> AbstractContextManager[None]:
        if self._history is None or self._history.depth == 0:
            return torch.no_grad()
        return self._history.showing(min(age, self._history.depth))


def largest(number: int) -> int:
    """The largest of all ranks' numbers. Collective."""
    values = torch.tensor([number], device=device())
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return int(values.item())
