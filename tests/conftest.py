# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
import functools
import inspect
from collections.abc import Iterator

import pytest

from benchmarks.processes import Pool
from tests.distributed.jobs import SMALL_CORPUS

# Megatron reads help texts from the source of its classes, 0.2 s for each parser; the tests make hundreds of them.
inspect.getsource = functools.cache(inspect.getsource)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes shared by every distributed test of the session."""
    with Pool(SMALL_CORPUS) as workers:
        yield workers
