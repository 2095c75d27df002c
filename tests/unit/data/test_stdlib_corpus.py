# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from megatron_async.data.preprocessing.stdlib_corpus import is_held_out, read_corpus, standard_library_root


def test_takes_each_readable_text_once(source_root: Path) -> None:
    train, valid = read_corpus(source_root)
    expected = {f"package_{number % 4}/module_{number:02}.py" for number in range(1, 40)} | {"unicode.py"}
    # Of two equal files the first in the order of paths stays.
    assert sorted([*train, *valid]) == sorted(expected | {"copy_of_module_00.py"})
    for path, text in train.items():
        assert text.encode() == (source_root / path).read_bytes()


def test_parts_are_disjoint_and_ordered(source_root: Path) -> None:
    train, valid = read_corpus(source_root)
    assert train and valid
    assert not set(train) & set(valid)
    assert list(train) == sorted(train) and list(valid) == sorted(valid)
    assert not set(train.values()) & set(valid.values())
    assert all(is_held_out(path) for path in valid) and not any(is_held_out(path) for path in train)


def test_part_depends_on_the_path_alone(source_root: Path, tmp_path: Path) -> None:
    train, valid = read_corpus(source_root)
    for path in (*list(train)[::2], *valid):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(f"# {path}\n")
    _, fewer = read_corpus(tmp_path)
    assert list(fewer) == list(valid)


def test_share_of_held_out_paths() -> None:
    paths = [f"folder_{number % 17}/file_{number}.py" for number in range(20_000)]
    # Binomial with p = 0.05: one standard deviation is 31 of 20000.
    assert sum(map(is_held_out, paths)) == pytest.approx(1000, abs=125)


@pytest.mark.parametrize("names", [("a.py", "b.py"), ("c.py", "d.py", "e.py")])
def test_small_folder_has_both_parts(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (tmp_path / name).write_text(f"name = '{name}'\n")
    train, valid = read_corpus(tmp_path)
    assert len(valid) == 1 and len(train) == len(names) - 1


def test_too_few_files(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("one = 1\n")
    with pytest.raises(ValueError, match=r"holds 1 readable Python files.*at least 2"):
        read_corpus(tmp_path)


def test_standard_library_is_a_few_megabytes() -> None:
    train, valid = read_corpus()
    assert 3e6 < sum(map(len, train.values())) < 3e7
    assert 0.01 < len(valid) / len(train) < 0.12
    assert all((standard_library_root() / path).is_file() for path in valid)
