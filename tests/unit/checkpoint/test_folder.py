# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Checkpoint folders on disk: publication, damage, retention, the choice of a checkpoint. No processes."""

import json
import os
import shutil
from pathlib import Path

import pytest

from megatron_async.checkpoint import folder, manifest
from megatron_async.checkpoint.manifest import Manifest
from tools import inspect_checkpoint

FILES = {
    "__0_0.distcp": b"weights" * 100,
    "__1_0.distcp": b"moments" * 50,
    ".metadata": b"index",
    "metadata.json": b"{}",
}


def stage(root: Path, iteration: int, *, complete: bool = True) -> Path:
    """Write a checkpoint as a save does, up to the point before it is published."""
    folder.clean_staging(root)
    path = root / folder.STAGING / folder.name_of(iteration)
    path.mkdir()
    for name, content in FILES.items():
        (path / name).write_bytes(content)
    if complete:
        facts = manifest.measure(path, manifest.file_names(path), sync=True)
        manifest.write(path, Manifest(iteration, facts, {"seed": 7}, {"torch": "x"}))
    return path


def save(root: Path, iteration: int) -> Path:
    stage(root, iteration)
    folder.publish(root, iteration)
    return root / folder.name_of(iteration)


def usable(root: Path) -> list[int]:
    """Iterations of checkpoints that a load would accept after reading every byte, newest first."""
    known = folder.checkpoints(root)
    return [entry.iteration for entry in known if not entry.problems and not entry.content_problems()]


def chosen(root: Path, step: int | None = None) -> int | None:
    """Iteration that a run starts from."""
    found = folder.choose(root, step, folder.Found.content_problems)
    return found.iteration if found else None


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip_a_byte, Path.unlink])
@pytest.mark.parametrize("name", [*FILES, manifest.NAME])
def test_damage_of_any_file_is_found_and_the_one_before_is_used(tmp_path, damage, name):
    save(tmp_path, 10)
    newest = save(tmp_path, 20)
    assert usable(tmp_path) == [20, 10]
    damage(newest / name)
    assert usable(tmp_path) == [10]
    assert inspect_checkpoint.main([str(tmp_path)]) == 1
    assert inspect_checkpoint.main([str(tmp_path / folder.name_of(10))]) == 0


def test_a_half_written_checkpoint_is_invisible_and_cleaned_up(tmp_path):
    save(tmp_path, 10)
    stage(tmp_path, 20, complete=False)
    assert usable(tmp_path) == [10]
    folder.clean_staging(tmp_path)
    assert not any((tmp_path / folder.STAGING).iterdir())
    assert usable(tmp_path) == [10]


def test_killed_between_manifest_and_publication(tmp_path):
    """The checkpoint is whole, only its renaming was lost: the next start finishes it."""
    save(tmp_path, 10)
    stage(tmp_path, 20)
    assert usable(tmp_path) == [10]
    folder.clean_staging(tmp_path)
    assert usable(tmp_path) == [20, 10]
    assert folder.pointer(tmp_path) == "20"


def test_the_pointer_is_not_needed(tmp_path):
    save(tmp_path, 10)
    save(tmp_path, 20)
    (tmp_path / folder.TRACKER).write_text("nonsense")
    assert folder.newest(tmp_path).iteration == 20
    (tmp_path / folder.TRACKER).unlink()
    assert folder.newest(tmp_path).iteration == 20


def test_an_iteration_saved_again_replaces_the_old_one(tmp_path):
    path = save(tmp_path, 10)
    flip_a_byte(path / ".metadata")
    assert usable(tmp_path) == []
    save(tmp_path, 10)
    assert usable(tmp_path) == [10]
    assert not (tmp_path / folder.STAGING).exists()


def test_keep_last_and_milestones(tmp_path):
    for iteration in (10, 20, 30, 40, 50):
        save(tmp_path, iteration)
    flip = tmp_path / folder.name_of(40) / manifest.NAME
    flip.unlink()
    # Damaged ones do not count as kept: 50 and 30 are the newest two whole ones; 20 is a milestone.
    assert folder.expired(tmp_path, 50, keep_last=2, milestone=20) == [10]
    assert folder.expired(tmp_path, 50, keep_last=2, milestone=None) == [20, 10]
    folder.delete(tmp_path, 10)
    assert usable(tmp_path) == [50, 30, 20]


def test_a_later_damaged_checkpoint_does_not_expire_the_one_just_saved(tmp_path):
    for iteration in (10, 20, 40):
        save(tmp_path, iteration)
    flip_a_byte(tmp_path / folder.name_of(40) / "__0_0.distcp")  # found by its checksum, when the run loads 20
    save(tmp_path, 30)
    assert folder.expired(tmp_path, 30, keep_last=1, milestone=None) == [20, 10]


def test_an_old_checkpoint_that_cannot_be_removed_ends_no_run(tmp_path, caplog, monkeypatch):
    save(tmp_path, 10)
    save(tmp_path, 20)

    def busy(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(39, "Directory not empty", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        folder.delete(tmp_path, 10)
        assert "iter_0000010 could not be removed: " in caplog.text
        save(tmp_path, 30)  # beside what is left in the staging folder
    assert usable(tmp_path) == [30, 20]


def test_a_checkpoint_of_megatron_itself_is_taken_at_its_word(tmp_path):
    path = save(tmp_path, 10)
    (path / manifest.NAME).unlink()
    found = folder.newest(tmp_path)
    assert found is not None and found.manifest is None
    (tmp_path / folder.TRACKER).unlink()
    assert folder.newest(tmp_path) is None


def test_manifest_in_another_format(tmp_path):
    path = save(tmp_path, 10)
    outer = json.loads((path / manifest.NAME).read_text())
    outer["body"] = outer["body"].replace('"format": 1', '"format": 2')
    (path / manifest.NAME).write_text(json.dumps(outer))
    with pytest.raises(ValueError, match="checksum"):
        manifest.read(path)


def test_no_complete_checkpoint_is_an_error_and_not_a_new_start(tmp_path):
    assert chosen(tmp_path) is None
    path = save(tmp_path, 10)
    save(tmp_path, 20)
    flip_a_byte(path / manifest.NAME)
    shutil.rmtree(tmp_path / folder.name_of(20))
    with pytest.raises(ValueError, match=r"no complete checkpoint.*iter_0000010: manifest.json"):
        chosen(tmp_path)


def test_another_format_of_megatrons_is_named(tmp_path):
    """`--auto-detect-ckpt-format` is never needed: --load takes torch_dist alone, and says so."""
    path = tmp_path / folder.name_of(5)
    (path / "mp_rank_00").mkdir(parents=True)
    (path / "mp_rank_00" / "model_optim_rng.pt").touch()
    (tmp_path / folder.TRACKER).write_text("5")
    with pytest.raises(ValueError, match=r"iter_0000005: no metadata.json: save it once with Megatron"):
        chosen(tmp_path)
    (path / "metadata.json").write_text("{}")
    assert chosen(tmp_path) == 5


def test_ckpt_step(tmp_path):
    save(tmp_path, 10)
    save(tmp_path, 20)
    assert chosen(tmp_path, 10) == 10
    with pytest.raises(ValueError, match="there: 20, 10"):
        chosen(tmp_path, 15)
    for damage in (flip_a_byte, truncate):
        damage(tmp_path / folder.name_of(10) / "__0_0.distcp")
        with pytest.raises(ValueError, match=r"--ckpt-step 10: no complete .*iter_0000010: __0_0.distcp has "):
            chosen(tmp_path, 10)


def test_tools_read_the_checkpoint_that_a_run_starts_from(tmp_path, caplog):
    for iteration in (10, 20, 30):
        save(tmp_path, iteration)
    flip_a_byte(tmp_path / folder.name_of(30) / "__0_0.distcp")
    truncate(tmp_path / folder.name_of(20) / "__1_0.distcp")
    assert folder.pointer(tmp_path) == "30"
    assert folder.locate(tmp_path) == tmp_path / folder.name_of(chosen(tmp_path)) == tmp_path / folder.name_of(10)
    for iteration, record in zip((30, 20), caplog.records, strict=True):
        assert f"skipped a damaged checkpoint: {tmp_path / folder.name_of(iteration)}: __" in record.getMessage()
    with pytest.raises(ValueError, match=r"--ckpt-step 30: no complete checkpoint"):
        folder.locate(tmp_path, 30)


def test_one_checkpoint_is_read_as_it_is_unless_it_is_damaged(tmp_path):
    path = save(tmp_path, 10)
    save(tmp_path, 20)
    assert folder.locate(path) == path
    with pytest.raises(ValueError, match="is one checkpoint"):
        folder.locate(path, 20)
    flip_a_byte(path / "__0_0.distcp")
    with pytest.raises(ValueError, match=r"Damaged: .*iter_0000010: __0_0\.distcp has changed"):
        folder.locate(path)


def test_a_release_checkpoint_and_none(tmp_path):
    with pytest.raises(ValueError, match="no Megatron checkpoint of format torch_dist"):
        folder.locate(tmp_path)
    (tmp_path / "release").mkdir()
    (tmp_path / "release" / "metadata.json").write_text("{}")
    (tmp_path / folder.TRACKER).write_text("release")
    assert folder.locate(tmp_path) == tmp_path / "release"
