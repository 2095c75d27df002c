# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""`make parity` compares runs that exist: the arguments of each cell and of its oracle are accepted."""

import functools
import inspect

import pytest

from megatron_async.platform import activate

activate("cpu")

from megatron_async.config import arguments  # noqa: E402
from tests.distributed.jobs import line  # noqa: E402
from tests.distributed.matrix import cells  # noqa: E402


def test_every_cell_and_its_oracle_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    # Megatron's parser reads the source of its configuration classes for help texts: two thirds of a parse.
    monkeypatch.setattr(inspect, "getsource", functools.cache(inspect.getsource))
    runs = {(cell.pipeline, cell.ranks) for cell in cells() if not cell.excluded}
    runs |= {(cell.reference, cell.reference_ranks) for cell in cells() if not cell.excluded}
    assert len(runs) > 150
    for words, ranks in sorted(runs):
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        arguments.parse([*line(words.split()), "--dry-run"])
