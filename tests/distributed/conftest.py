# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
from functools import cache
from pathlib import Path

import pytest

from benchmarks.processes import Pool
from tests.distributed.jobs import Outcome


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory):
    """Runs that were not stopped and left checkpoints on the way, each made once: folder, outcomes."""

    @cache
    def run(recipe: str, ranks: int, every: int = 3) -> tuple[Path, list[Outcome]]:
        folder = tmp_path_factory.mktemp("saved")
        arguments = f"{recipe} --save {folder} --save-interval {every}".split()
        return folder, pool.run("tests.distributed.jobs:train", arguments, ranks=ranks, timeout=600)

    return run
