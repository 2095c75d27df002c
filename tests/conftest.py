# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes shared by every distributed test of the session."""
    workers = Pool()
    yield workers
    workers.close()
