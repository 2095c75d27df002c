# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The reference of every delayed schedule: a delay emulated in one process, with plain copies of the weights.

A parameter with delay d has its gradient of batch b taken at its version max(b - d, 0), counted from the start of
the delay, while the update is applied to the newest version. Nothing here is shared with the pipeline's own weight
versions. Different delays for different parameters emulate other schedules: 1 for all of them is 2BW.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch


class DelayedWeights:
    """Lets a synchronous training step take its gradients at older weights.

    Args:
        delays: delay in updates for each parameter, at least 0.
    """

    def __init__(self, delays: Mapping[torch.nn.Parameter, int]) -> None:
        # history[p][-1] is the newest version known, at most delay + 1 of them.
        self._history = {param: deque([param.detach().clone()], maxlen=delay + 1) for param, delay in delays.items()}

    @contextmanager
    def stale(self) -> Iterator[None]:
        """Compute forwards and backwards of a batch with each parameter's delayed version; restore afterwards."""
        newest = {param: param.detach().clone() for param in self._history}
        self._load({param: versions[0] for param, versions in self._history.items()})
        try:
            yield
        finally:
            self._load(newest)

    def record(self) -> None:
        """Note the weights after an update as the newest version."""
        for param, versions in self._history.items():
            versions.append(param.detach().clone())

    def restart(self) -> None:
        """Forget older versions: the next batch is computed with the newest weights."""
        for param, versions in self._history.items():
            versions.clear()
            versions.append(param.detach().clone())

    @property
    def depth(self) -> int:
        """The largest delay of a parameter."""
        return max((versions.maxlen or 1) - 1 for versions in self._history.values())

    @contextmanager
    def showing(self, age: int) -> Iterator[None]:
        """Let parameters show the storage of their version of `age` updates ago, or of the oldest known.

        A parameter with a smaller delay shows a copy of its oldest version.
        """
        newest = {param: param.data for param in self._history}
        for param, versions in self._history.items():
            kept = age < (versions.maxlen or 1)
            param.data = versions[max(len(versions) - 1 - age, 0)] if kept else versions[0].clone()
        try:
            yield
        finally:
            for param, data in newest.items():
                param.data = data

    def fill(self) -> None:
        """Make every version that a delay needs a copy of the present weights."""
        for param, versions in self._history.items():
            versions.extend(param.detach().clone() for _ in range(versions.maxlen or 1))

    @torch.no_grad()
    def _load(self, weights: Mapping[torch.nn.Parameter, torch.Tensor]) -> None:
        for param, values in weights.items():
            param.copy_(values)
