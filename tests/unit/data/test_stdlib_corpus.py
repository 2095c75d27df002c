# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from megatron_async.data.preprocessing.stdlib_corpus import is_held_out, read_corpus, standard_library_root


def test_takes_each_readable_text_once(source_root: Path) -> None:
    corpus = read_corpus(source_root)
    paths = [document.path for document in (*corpus.train, *corpus.valid)]
    expected = {f"package_{number % 4}/module_{number:02}.py" for number in range(1, 40)} | {"unicode.py"}
    # Of two equal files the first in the order of paths stays.
    assert sorted(paths) == sorted(expected | {"copy_of_module_00.py"})
    for document in corpus.train:
        assert document.text.encode() == (source_root / document.path).read_bytes()
        assert document.size == (source_root / document.path).stat().st_size


def test_parts_are_disjoint_and_ordered(source_root: Path) -> None:
    corpus = read_corpus(source_root)
    train, valid = ([document.path for document in part] for part in (corpus.train, corpus.valid))
    assert train and valid
    assert not set(train) & set(valid)
    assert train == sorted(train) and valid == sorted(valid)
    assert not {d.digest for d in corpus.train} & {d.digest for d in corpus.valid}
    assert all(is_held_out(path) for path in valid) and not any(is_held_out(path) for path in train)


def test_part_depends_on_the_path_alone(source_root: Path, tmp_path: Path) -> None:
    corpus = read_corpus(source_root)
    for document in (*corpus.train[::2], *corpus.valid):
        (tmp_path / document.path).parent.mkdir(exist_ok=True)
        (tmp_path / document.path).write_text(f"# {document.path}\n")
    fewer = read_corpus(tmp_path)
    assert [document.path for document in fewer.valid] == [document.path for document in corpus.valid]


def test_share_of_held_out_paths() -> None:
    paths = [f"folder_{number % 17}/file_{number}.py" for number in range(20_000)]
    # Binomial with p = 0.05: one standard deviation is 31 of 20000.
    assert sum(map(is_held_out, paths)) == pytest.approx(1000, abs=125)


@pytest.mark.parametrize("names", [("a.py", "b.py"), ("c.py", "d.py", "e.py")])
def test_small_folder_has_both_parts(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (tmp_path / name).write_text(f"name = '{name}'\n")
    corpus = read_corpus(tmp_path)
    assert len(corpus.valid) == 1 and len(corpus.train) == len(names) - 1


def test_too_few_files(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("one = 1\n")
    with pytest.raises(ValueError, match=r"holds 1 readable Python files.*at least 2"):
        read_corpus(tmp_path)


def test_standard_library_is_a_few_megabytes() -> None:
    corpus = read_corpus()
    assert 3e6 < sum(document.size for document in corpus.train) < 3e7
    assert 0.01 < len(corpus.valid) / len(corpus.train) < 0.12
    assert all((standard_library_root() / document.path).is_file() for document in corpus.valid)
