# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Older weight versions of a chunk, as Megatron loads them."""

import torch

from megatron_async.checkpoint.state import SavedChunk


class Chunk(torch.nn.Linear):
    """A layer with extra state that no checkpoint of another implementation has."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0)

    def set_extra_state(self, state: torch.Tensor) -> None:
        assert state.numel() == 0


class Versions:
    depth = 1

    def __init__(self, chunk: Chunk) -> None:
        self._chunk, self.older = chunk, torch.zeros_like(chunk.weight)

    def fill(self) -> None:
        self.older.copy_(self._chunk.weight)

    def showing(self, age: int) -> "Versions":
        return self

    def __enter__(self) -> None:
        self._newest, self._chunk.weight.data = self._chunk.weight.data, self.older

    def __exit__(self, *_: object) -> None:
        self._chunk.weight.data = self._newest


def test_older_versions_survive_a_second_attempt_to_load():
    """Megatron loads again, not strictly, where the first attempt fails."""
    chunk = Chunk(2, 2, bias=False)
    saved, history = SavedChunk(chunk, 1), Versions(chunk)
    state = {"weight": torch.full((2, 2), 3.0), "older.1.weight": torch.full((2, 2), 2.0)}
    try:
        saved.load_state_dict(state)
        raise AssertionError("the extra state is missing")
    except RuntimeError:
        saved.load_state_dict(state, strict=False)
    saved.restore(history)
    assert torch.equal(chunk.weight, state["weight"]) and torch.equal(history.older, state["older.1.weight"])
