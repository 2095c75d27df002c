# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The one guard of random number generators."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from megatron.core import tensor_parallel


@contextmanager
def fork_rng() -> Iterator[None]:
    """Restore all RNG states on exit: Python's, NumPy's, torch's (CPU and this rank's GPU) and Megatron's tracker's."""
    tracker = tensor_parallel.get_cuda_rng_tracker()
    states = random.getstate(), np.random.get_state(), torch.get_rng_state(), torch.cuda.get_rng_state()
    tracked = tracker.get_states()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.cuda.set_rng_state(states[3])
        torch.set_rng_state(states[2])
        tracker.set_states(tracked)
