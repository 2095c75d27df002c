# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A rank's part of a checkpoint, written without other ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.planner_helpers import _create_write_items

from megatron_async.mcore import checkpoint
from megatron_async.mcore.checkpoint import CheckpointPart


def part_of(folder: Path, *tensors: torch.Tensor) -> CheckpointPart:
    part = CheckpointPart(folder)
    part.folder, part.file = folder, "__0_0.distcp"
    part._items = [(_create_write_items(f"{tensor.shape}", tensor)[0], tensor) for tensor in tensors]
    return part


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
    write_item = checkpoint._filesystem._write_item

    def lose_the_end(transforms: Any, stream: Any, *args: Any, **kwargs: Any) -> Any:
        result = write_item(transforms, stream, *args, **kwargs)
        stream.truncate(result.size_in_bytes - 1)
        return result

    monkeypatch.setattr(checkpoint._filesystem, "_write_item", lose_the_end)
    with pytest.raises(OSError, match=r"__0_0\.distcp has \d+ bytes instead of \d+"):
        part_of(tmp_path, torch.ones(4)).write()
