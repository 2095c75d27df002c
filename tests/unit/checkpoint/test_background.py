# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A checkpoint is published when every rank's part is on the disk, and never otherwise. Threads in place of ranks."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_async.checkpoint.background import Writing


class Part:
    """In the place of `CheckpointPart`: writes a small file when it is allowed to."""

    def __init__(self, folder: Path, rank: int, fails: bool = False) -> None:
        self.folder, self.file, self.allowed, self._fails = folder, f"{rank}", threading.Event(), fails

    def write(self) -> list[int]:
        assert self.allowed.wait(10)
        if self._fails:
            raise OSError("no space")
        (self.folder / self.file).write_text(self.file)
        return [int(self.file)]


Start = Callable[..., tuple[list[Part], list[Writing], list]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    def begin(failing: int | None = None, minutes: float = 1.0) -> tuple[list[Part], list[Writing], list]:
        store, published = dist.HashStore(), []
        parts = [Part(tmp_path, rank, fails=rank == failing) for rank in range(3)]
        writings = [
            Writing(
                part,
                lambda results, files: published.append((results, files)),
                iteration=7,
                name="save/0",
                rank=rank,
                ranks=3,
                store=store,
                timeout_minutes=minutes,
            )
            for rank, part in enumerate(parts)
        ]
        return parts, writings, published

    return begin


def test_published_when_the_last_part_is_there(start: Start):
    parts, writings, published = start()
    for rank in (0, 2):
        parts[rank].allowed.set()
    writings[2].wait()
    writings[0]._thread.join(0.2)
    assert not published
    parts[1].allowed.set()
    writings[0].wait()
    ((results, files),) = published
    assert list(results) == [[0], [1], [2]]
    assert sorted(files) == ["0", "1", "2"]
    assert files["1"].bytes == 1


def test_a_part_that_fails_is_reported_by_its_rank_and_nothing_is_published(start: Start):
    parts, writings, published = start(failing=1)
    for part in parts:
        part.allowed.set()
    writings[0].wait()
    writings[2].wait()
    with pytest.raises(OSError, match="no space"):
        writings[1].wait()
    assert [writing.error is not None for writing in writings] == [False, True, False]
    assert not published


def test_a_part_that_never_comes_is_named(start: Start):
    parts, writings, published = start(minutes=0.005)
    parts[0].allowed.set()
    with pytest.raises(TimeoutError, match="rank 1, 2 did not write its part"):
        writings[0].wait()
    assert not published
    for part in parts:
        part.allowed.set()
