# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
import errno
from pathlib import Path
from typing import Any

import pytest

from megatron_async.data.blend import Blend, DataSources
from megatron_async.data.index_cache import building, cache_folder, contents


def write_index(folder: Path, content: bytes) -> str:
    (folder / "data.idx").write_bytes(content)
    return str(folder / "data")


def test_folder_follows_the_content(tmp_path: Path) -> None:
    prefix = write_index(tmp_path, b"x" * 5_000_000)
    first = cache_folder([prefix], None)
    assert Path(first).parent == tmp_path / "index_cache"
    assert cache_folder([prefix], None) == first
    assert Path(cache_folder([prefix], "chosen")) == Path("chosen") / Path(first).name
    for changed in (b"x" * 4_999_999, b"x" * 4_999_999 + b"y", b"y" + b"x" * 4_999_999):
        write_index(tmp_path, changed)
        assert cache_folder([prefix], None) != first


def test_contents_do_not_depend_on_the_place(tmp_path: Path) -> None:
    """They are the order's: documents, weights, the order of the sets."""
    for name, content in (("here", b"x" * 100), ("there", b"x" * 100), ("other", b"y" * 100)):
        (tmp_path / name).mkdir()
        write_index(tmp_path / name, content)
    here, there, other = (str(tmp_path / name / "data") for name in ("here", "there", "other"))

    def digest(prefixes: tuple[str, ...], weights: list[float] | None = None) -> str | None:
        return contents(DataSources(Blend(list(prefixes), weights), None, ()))

    assert digest((here,)) == digest((there,)) != digest((other,))
    assert digest((here, other)) != digest((other, here))
    assert digest((here, other), [1.0, 2.0]) != digest((here, other), [1.0, 3.0])
    assert digest(("s3://bucket/data",)) is None


def test_finished_build_is_kept_and_torn_one_cleared(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with building(str(folder)):
        (folder / "order.npy").write_bytes(b"whole")
    with building(str(folder)):
        assert (folder / "order.npy").read_bytes() == b"whole"
    with pytest.raises(RuntimeError), building(str(folder)):
        (folder / "order.npy").write_bytes(b"to")
        raise RuntimeError
    with building(str(folder)):
        assert not (folder / "order.npy").exists()


def test_read_only_folder_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "order.npy").write_bytes(b"whole")

    open_path = Path.open

    def refuse_lock(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == ".lock":
            raise PermissionError(errno.EACCES, "Permission denied")
        return open_path(path, *arguments, **options)

    # The tests may run as root, whom permissions do not stop.
    monkeypatch.setattr(Path, "open", refuse_lock)
    with building(str(tmp_path)):
        assert (tmp_path / "order.npy").read_bytes() == b"whole"
