# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Versions of a chunk's weights, chosen by pointing tensors at other storage.

Autograd saves the parameter object, not its storage: a backward (and its recomputation) uses the version in use then.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch


class Pointer(Protocol):
    """Something that computes with one piece of storage at a time and can be pointed at another."""

    @property
    def target(self) -> torch.Tensor:
        """The storage in use."""

    def point(self, target: torch.Tensor) -> None:
        """Use `target`, a tensor of the same shape and type, from now on."""


class WeightVersions:
    """Weight versions of one model chunk. W_0 is the initial version.

    Args:
        pointers: everything that an update changes.
        limit: how many versions may be alive. With 1, an update overwrites the weights, which is right where
            nothing in flight was computed with them.
        newest: number of the version that the pointers now show.
    """

    def __init__(self, pointers: Iterable[Pointer], *, limit: int, newest: int = 0) -> None:
        self._pointers = list(pointers)
        self._limit = limit
        self._alive: dict[int, list[torch.Tensor]] = {newest: [pointer.target for pointer in self._pointers]}
        # Allocated now, so that a run's memory is known from its first batch on.
        self._free = [[torch.empty_like(target) for target in self._alive[newest]] for _ in range(limit - 1)]
        self._opened: list[torch.Tensor] | None = None
        self._used: int | None = newest

    @property
    def newest(self) -> int:
        return max(self._alive)

    @property
    def alive(self) -> tuple[int, ...]:
        return tuple(sorted(self._alive))

    def use(self, version: int) -> None:
        """Compute with `version` from now on."""
        if version == self._used:
            return
        assert version in self._alive, f"weight version {version} is not alive, only {self.alive}"
        self._point_at(self._alive[version])
        self._used = version

    @property
    def depth(self) -> int:
        """How many updates old the weights are that coming batches may need."""
        return self._limit - 1

    @contextmanager
    def showing(self, age: int) -> Iterator[None]:
        """Use the weights of `age` updates ago, or the oldest known, for a moment. The newest are in use otherwise."""
        self.use(max(self.newest - age, min(self._alive)))
        try:
            yield
        finally:
            self.use(self.newest)

    def fill(self) -> None:
        """Before the first update: make every older version that there is room for alive, as a copy of the newest."""
        newest = self.newest
        for age, buffers in enumerate(self._free, 1):
            _copy(buffers, self._alive[newest])
            self._alive[newest - age] = buffers
        self._free.clear()

    def open_next(self) -> None:
        """Retire the oldest version if there is no room, and prepare the next one as a copy of the newest.

        The pointers show the copy afterwards: an in-place optimizer step on the weights, or a copy from master
        weights into them, writes the next version and leaves the others as they are.
        """
        newest = self._alive[self.newest]
        if len(self._alive) == self._limit:
            self._free.append(self._alive.pop(min(self._alive)))
        self._opened = self._free.pop()
        if self._opened is not newest:
            _copy(self._opened, newest)
        self._point_at(self._opened)
        self._used = None

    def publish_next(self, version: int) -> None:
        """Make what `open_next` prepared `version`, the newest one, and use it."""
        assert self._opened is not None
        self._alive[version], self._opened = self._opened, None
        self._used = version

    def _point_at(self, targets: Sequence[torch.Tensor]) -> None:
        for pointer, target in zip(self._pointers, targets, strict=True):
            pointer.point(target)


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if targets:  # a chunk without trained parameters has none
        torch._foreach_copy_(targets, sources)
