# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Checkpoint folders on disk: publication, damage, retention, what a run may be resumed with. No processes."""

import argparse
import json
import os
import shutil
from pathlib import Path

import pytest

from megatron_async.checkpoint import compatibility, folder, manifest
from megatron_async.checkpoint.manifest import Manifest, ManifestError
from tools import inspect_checkpoint

FILES = {
    "__0_0.distcp": b"weights" * 100,
    "__1_0.distcp": b"moments" * 50,
    ".metadata": b"index",
    "metadata.json": b"{}",
}
SAVED = {"num_layers": 4, "optimizer": "adam", "train_iters": 100, "lr": 0.1, "lr_decay_iters": None, "seed": 7}


def stage(root: Path, iteration: int, *, complete: bool = True) -> Path:
    """Write a checkpoint as a save does, up to the point before it is published."""
    folder.clean_staging(root)
    path = folder.staging(root) / folder.name_of(iteration)
    path.mkdir()
    for name, content in FILES.items():
        (path / name).write_bytes(content)
    if complete:
        facts = manifest.measure(path, manifest.file_names(path), sync=True)
        manifest.write(path, Manifest(iteration, facts, SAVED, {"torch": "x"}))
    return path


def save(root: Path, iteration: int) -> Path:
    stage(root, iteration)
    folder.publish(root, iteration)
    return root / folder.name_of(iteration)


def usable(root: Path) -> list[int]:
    """Iterations of checkpoints that a load would accept after reading every byte, newest first."""
    damaged: dict[int, tuple[str, ...]] = {}
    for entry in folder.checkpoints(root):
        if entry.manifest and not entry.problems:
            problems = manifest.content_problems(entry.path, entry.manifest, list(entry.manifest.files))
            if problems:
                damaged[entry.iteration] = tuple(problems)
    return [entry.iteration for entry in compatibility.entries(root, damaged) if not entry.problems]


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
    assert not any(folder.staging(tmp_path).iterdir())
    assert usable(tmp_path) == [10]


def test_killed_between_manifest_and_publication(tmp_path):
    """The checkpoint is whole, only its renaming was lost: the next start finishes it."""
    save(tmp_path, 10)
    stage(tmp_path, 20)
    assert usable(tmp_path) == [10]
    folder.clean_staging(tmp_path)
    assert usable(tmp_path) == [20, 10]
    assert folder.tracked(tmp_path) == 20


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
    assert not folder.staging(tmp_path).exists()


def test_keep_last_and_milestones(tmp_path):
    for iteration in (10, 20, 30, 40, 50):
        save(tmp_path, iteration)
    flip = tmp_path / folder.name_of(40) / manifest.NAME
    flip.unlink()
    # Damaged ones do not count as kept: 50 and 30 are the newest two whole ones; 20 is a milestone.
    assert folder.expired(tmp_path, keep_last=2, milestone=20) == [10]
    assert folder.expired(tmp_path, keep_last=2, milestone=None) == [20, 10]
    folder.delete(tmp_path, 10)
    assert usable(tmp_path) == [50, 30, 20]


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
    with pytest.raises(ManifestError, match="checksum"):
        manifest.read(path)


def arguments(**changes: object) -> argparse.Namespace:
    defaults = {
        "no_load_optim": False,
        "staleness_correction": "none",
        "override_opt_param_scheduler": False,
        "ckpt_step": None,
        "num_experts": None,
    }
    return argparse.Namespace(
        **(defaults | SAVED | {"use_checkpoint_opt_param_scheduler": False, "lr_decay_iters": None} | changes)
    )


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"num_layers": 8}, "--num-layers is 8"),
        ({"optimizer": "muon"}, "--optimizer is muon"),
        ({"seed": 8}, "--seed is 8"),
        ({"lr": 0.2}, "--lr is 0.2"),
        ({"train_iters": 200}, "--lr-decay-iters is 200"),
    ],
)
def test_what_cannot_change_is_named(tmp_path, changes, flag):
    (problem,) = compatibility.differences(arguments(**changes), SAVED, tmp_path)
    assert flag in problem and str(tmp_path) in problem


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train_iters": 200, "lr_decay_iters": 100},
        {"lr": 0.2, "override_opt_param_scheduler": True},
        {"train_iters": 200, "use_checkpoint_opt_param_scheduler": True},
        {"optimizer": "muon", "no_load_optim": True},
    ],
)
def test_what_can_change(tmp_path, changes):
    assert list(compatibility.differences(arguments(**changes), SAVED, tmp_path)) == []


@pytest.mark.parametrize(
    ("before", "now", "refused"),
    [
        ("error-feedback", "error-feedback", False),
        ("none", "weight-prediction", False),
        ("error-feedback", "none", False),
        ("error-feedback", "dc-asgd", True),
        ("weight-prediction", "weight-prediction-updated", True),
        ("weight-prediction", "none", True),
    ],
)
def test_a_correction_does_not_become_another(tmp_path, before, now, refused):
    changes = {"staleness_correction": now, "correction_strength": 0.5}
    saved = SAVED | {"staleness_correction": before, "correction_strength": 1.0}
    problems = list(compatibility.differences(arguments(**changes), saved, tmp_path))
    assert [f"--staleness-correction is {now}" in problem for problem in problems] == [True] * refused
    assert list(compatibility.differences(arguments(**changes, no_load_optim=True), saved, tmp_path)) == []


def test_no_whole_checkpoint_is_an_error_and_not_a_new_start(tmp_path):
    assert compatibility.chosen(arguments(), tmp_path) is None
    path = save(tmp_path, 10)
    save(tmp_path, 20)
    flip_a_byte(path / manifest.NAME)
    shutil.rmtree(tmp_path / folder.name_of(20))
    with pytest.raises(ValueError, match=r"iter_0000010.*manifest.json"):
        compatibility.chosen(arguments(), tmp_path)


def test_ckpt_step(tmp_path):
    save(tmp_path, 10)
    save(tmp_path, 20)
    chosen = compatibility.chosen(arguments(ckpt_step=10), tmp_path)
    assert chosen is not None and chosen.iteration == 10
    with pytest.raises(ValueError, match="there: 20, 10"):
        compatibility.chosen(arguments(ckpt_step=15), tmp_path)
    truncate(tmp_path / folder.name_of(10) / "__0_0.distcp")
    with pytest.raises(ValueError, match="damaged"):
        compatibility.chosen(arguments(ckpt_step=10), tmp_path)
