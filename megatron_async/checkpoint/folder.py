# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A folder of checkpoints on disk: staging, publication, what is there, what may go. Plain files, no torch.

DIR/iter_0000100/                        a published checkpoint, in Megatron's layout, plus manifest.json
DIR/latest_checkpointed_iteration.txt    Megatron's pointer to the newest; we write it and do not rely on it
DIR/.unfinished/iter_0000120/            being written; renamed to DIR when it is whole
"""

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from megatron_async import files
from megatron_async.checkpoint import manifest
from megatron_async.checkpoint.manifest import Manifest, ManifestError

TRACKER = "latest_checkpointed_iteration.txt"
STAGING = ".unfinished"
_NAME = re.compile(r"iter_(\d{7,})")


@dataclass(frozen=True, slots=True)
class Found:
    """One checkpoint of a folder.

    Attributes:
        iteration: completed batches, from its name.
        path: its folder.
        manifest: None if it has none or a damaged one.
        problems: why it cannot be used; empty if nothing is known against it.
    """

    iteration: int
    path: Path
    manifest: Manifest | None
    problems: tuple[str, ...]


def name_of(iteration: int) -> str:
    """Megatron's name for the checkpoint after `iteration` batches."""
    return f"iter_{iteration:07d}"


def checkpoints(root: Path) -> list[Found]:
    """Every checkpoint of a folder, newest first, judged by manifest and file sizes."""
    if not root.is_dir():
        return []
    named = [(int(match[1]), path) for path in root.iterdir() if (match := _NAME.fullmatch(path.name))]
    found = [_judge(iteration, path) for iteration, path in sorted(named, reverse=True)]
    if not any(entry.manifest for entry in found):
        # Nothing here was written by this program, so a missing manifest says nothing: trust Megatron's pointer.
        trusted = tracked(root)
        found = [_trust(entry) if entry.iteration == trusted else entry for entry in found]
    return found


def newest(root: Path) -> Found | None:
    """The newest checkpoint with nothing known against it."""
    return next((entry for entry in checkpoints(root) if not entry.problems), None)


def tracked(root: Path) -> int | None:
    """The iteration that Megatron's pointer names; None without one, or for a release checkpoint."""
    try:
        return int((root / TRACKER).read_text())
    except (OSError, ValueError):
        return None


def is_release(root: Path) -> bool:
    """Whether Megatron's pointer names a release checkpoint: weights alone, at iteration 0."""
    try:
        return (root / TRACKER).read_text().strip() == "release"
    except OSError:
        return False


def staging(root: Path) -> Path:
    """Where checkpoints of `root` are written."""
    return root / STAGING


def clean_staging(root: Path) -> None:
    """Make an empty staging folder. A checkpoint found there whole is published first: only its renaming was lost."""
    folder = staging(root)
    if folder.is_dir():
        for path in folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and not (root / path.name).exists() and _is_whole(path):
                publish(root, int(match[1]))
                break
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def publish(root: Path, iteration: int) -> None:
    """Give a whole staged checkpoint its final name and point Megatron's pointer at it.

    An older one of the same iteration is moved aside before and removed after.
    """
    staged, final = staging(root) / name_of(iteration), root / name_of(iteration)
    aside = staging(root) / f"replaced_{name_of(iteration)}"
    if final.exists():
        os.replace(final, aside)
    os.replace(staged, final)
    files.sync_to_disk(root)
    files.write_atomically(root / TRACKER, str(iteration), sync=True)
    shutil.rmtree(staging(root), ignore_errors=True)


def expired(root: Path, *, keep_last: int, milestone: int | None) -> list[int]:
    """Iterations that may be deleted: whole ones beyond the newest `keep_last`, except every `milestone`-th."""
    whole = [entry.iteration for entry in checkpoints(root) if not entry.problems]
    return [iteration for iteration in whole[keep_last:] if not milestone or iteration % milestone]


def delete(root: Path, iteration: int) -> None:
    """Remove a checkpoint; it loses its name first, so that no half-removed one can be mistaken for a damaged one."""
    path = root / name_of(iteration)
    if path.is_symlink():
        return  # somebody keeps it elsewhere
    aside = staging(root) / f"expired_{name_of(iteration)}"
    staging(root).mkdir(exist_ok=True)
    os.replace(path, aside)
    shutil.rmtree(staging(root))


def _judge(iteration: int, path: Path) -> Found:
    try:
        content = manifest.read(path)
    except ManifestError as error:
        return Found(iteration, path, None, (str(error),))
    return Found(iteration, path, content, tuple(manifest.size_problems(path, content)))


def _trust(entry: Found) -> Found:
    damaged = (entry.path / manifest.NAME).exists()
    return entry if damaged else Found(entry.iteration, entry.path, None, ())


def _is_whole(path: Path) -> bool:
    try:
        content = manifest.read(path)
    except ManifestError:
        return False
    return not manifest.size_problems(path, content) and not manifest.content_problems(
        path, content, list(content.files)
    )
