# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The one guard of random number generators."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from megatron.core.tensor_parallel.random import _fork_rng


@contextmanager
def fork_rng() -> Iterator[None]:
    """Restore all RNG states on exit: Python's, NumPy's, and, as Megatron does, torch's (CPU and this rank's GPU) and
    its tracker's."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with _fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
