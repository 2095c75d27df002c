# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A rank's part of a checkpoint, written without other ranks."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import DefaultSavePlanner

from megatron_async.mcore.checkpoint import CheckpointPart


def part_of(folder: Path, *tensors: torch.Tensor) -> CheckpointPart:
    """The part of a checkpoint of one rank, planned by torch."""
    part, planner = CheckpointPart(folder), DefaultSavePlanner()
    planner.set_up_planner({str(number): tensor for number, tensor in enumerate(tensors)}, is_coordinator=True)
    plans, _ = planner.create_global_plan([planner.create_local_plan()])
    (plan,) = part.prepare_global_plan(plans)
    part.prepare_write_data(plan, planner)
    return part


class LosingFile(io.FileIO):
    """A file on a disk that loses its last byte without an error."""

    def close(self) -> None:
        if not self.closed:
            self.truncate(self.tell() - 1)
        super().close()


def test_of_a_view_only_its_own_elements_are_written(tmp_path: Path):
    base = torch.arange(100_000.0)
    (entry,) = part_of(tmp_path, base[10:20]).write()
    file = tmp_path / "__0_0.distcp"
    assert file.stat().st_size == entry.size_in_bytes < 10_000
    assert torch.equal(torch.load(file), base[10:20])


def test_a_copied_part_holds_the_values_of_that_moment(tmp_path: Path):
    tensor = torch.ones(4)
    part = part_of(tmp_path, tensor)
    part.copy_tensors()
    tensor.zero_()
    part.write()
    assert torch.equal(torch.load(tmp_path / "__0_0.distcp"), torch.ones(4))


def test_an_empty_part_leaves_no_file(tmp_path: Path):
    assert part_of(tmp_path).write() == []
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_came_out_short_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def open_losing(path: Path, mode: str, **_: Any) -> LosingFile:
        return LosingFile(path, mode)

    part = part_of(tmp_path, torch.ones(4))
    monkeypatch.setattr(Path, "open", open_losing)
    with pytest.raises(OSError, match=r"__0_0\.distcp has \d+ bytes instead of \d+"):
        part.write()
