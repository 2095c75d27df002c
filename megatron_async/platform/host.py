# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Copies of small values between host and device that do not synchronize the device."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist


def to_device(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """A 1-D float64 tensor on the device. From pageable memory the copy would synchronize the stream."""
    tensor = torch.tensor(values, dtype=torch.float64)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class HostValues:
    """A 1-D tensor copied to the host in the background.

    Reading waits for the copy alone, not for work queued after it, so a GPU goes on computing.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if values.is_cuda:
            self._values = values.detach().to("cpu", non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._values = values.detach().clone()

    @property
    def ready(self) -> bool:
        return self._event is None or self._event.query()

    def read(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()


class Reduced[Shown]:
    """Values that are reduced over ranks in the background; nothing waits for them before `read`.

    Args:
        values: 1-D tensor, reduced in place.
        group: process group; None for one process.
        show: the reduced values -> what `read` returns.
        op: the reduction.
    """

    def __init__(
        self,
        values: torch.Tensor,
        group: dist.ProcessGroup | None,
        show: Callable[[list[float]], Shown],
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    ) -> None:
        self._work = dist.all_reduce(values, op=op, group=group, async_op=True) if group is not None else None
        self._values, self._show = values, show
        self._host: HostValues | None = None

    @property
    def ready(self) -> bool:
        """Whether `read` would not wait."""
        if self._host is None and self._work is not None and not self._work.is_completed():
            return False
        return self.fetch().ready

    def read(self) -> Shown:
        """What the values show. May wait."""
        return self._show(self.fetch().read())

    def fetch(self) -> HostValues:
        """Start the copy to the host. The current stream waits for the reduction; on CPUs the host does."""
        if self._host is None:
            if self._work is not None:
                self._work.wait()
            self._host = HostValues(self._values)
        return self._host


class Pace:
    """Keeps the host at most one forward or backward ahead of a GPU."""

    def __init__(self) -> None:
        self._last: torch.cuda.Event | None = None

    def __call__(self) -> torch.cuda.Event | None:
        """One is launched. Returns the end of the one before it, which the host has to wait for."""
        last, self._last = self._last, torch.cuda.Event()
        self._last.record()
        return last
