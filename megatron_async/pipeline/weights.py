# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Two versions of a stage's weights, chosen by pointer.

`param.data` is pointed at a buffer; nothing is copied to change the version. Autograd saves the parameter object,
not its storage, so a backward (and its recomputation) sees whatever version is in use when it runs.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch


class WeightVersions:
    """Weight versions of one model chunk. W_0 is the initial version; at most two are alive.

    Args:
        params: the parameters of the chunk; their present data become version `newest`.
        newest: number of that version.
    """

    def __init__(self, params: Iterable[torch.nn.Parameter], newest: int = 0) -> None:
        self._params = list(params)
        current = [param.data for param in self._params]
        self._alive: dict[int, list[torch.Tensor]] = {newest: current}
        self._spare: list[torch.Tensor] | None = [torch.empty_like(data) for data in current]
        self._used = newest

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
        return 1

    @contextmanager
    def showing(self, age: int) -> Iterator[None]:
        """Use the weights of `age` updates ago, or the oldest known, for a moment."""
        used = self._used
        self.use(max(self.newest - age, min(self._alive)))
        try:
            yield
        finally:
            self.use(used)

    def fill(self) -> None:
        """Before the first update: make the version before the newest alive, as a copy of it."""
        assert self._spare is not None, "an update has been made already"
        torch._foreach_copy_(self._spare, self._alive[self.newest])
        self._alive[self.newest - 1], self._spare = self._spare, None

    def open_next(self) -> None:
        """Retire the older version and prepare its buffer, filled with the newest weights, for the next update.

        The parameters point at that buffer afterwards: an in-place optimizer step on them, or a copy from master
        weights into them, writes the next version and leaves the newest one as it is.
        """
        newest = self.newest
        if self._spare is None:
            self._spare = self._alive.pop(min(self._alive))
        torch._foreach_copy_(self._spare, self._alive[newest])
        self._point_at(self._spare)

    def publish_next(self) -> int:
        """Make the buffer that `open_next` prepared the newest version; return its number."""
        assert self._spare is not None
        version = self.newest + 1
        self._alive[version] = self._spare
        self._spare = None
        self._used = version
        return version

    def _point_at(self, buffers: Sequence[torch.Tensor]) -> None:
        for param, data in zip(self._params, buffers, strict=True):
            param.data = data
