# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
import contextlib
from typing import Any


class CudaRNGStatesTracker:
    """Megatron derives a tracker of it that CUDA graphs need."""


def activation_recompute_forward(**_: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()
