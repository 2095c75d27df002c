# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Device values on their way to the host, without stopping the device."""

import torch


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
