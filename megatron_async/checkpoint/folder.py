# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A folder of checkpoints: its contents, the choice of one to load, publication, retention. Plain files, no torch.

DIR/iter_0000100/                        a published checkpoint in Megatron's layout, plus manifest.json
DIR/latest_checkpointed_iteration.txt    Megatron's pointer to the newest; written for other programs
DIR/.unfinished/iter_0000120/            being written; renamed into DIR when it is complete
"""

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_async.checkpoint import manifest
from megatron_async.checkpoint.manifest import Manifest
from megatron_async.files import sync_to_disk, write_atomically

TRACKER = "latest_checkpointed_iteration.txt"
STAGING = ".unfinished"
_RELEASE = "release"
_NAME = re.compile(r"iter_(\d{7,})")
_FORMAT = "metadata.json"  # Megatron's, in every checkpoint of its distributed format

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """One checkpoint of a folder.

    Attributes:
        iteration: completed batches, from its name.
        path: its folder.
        manifest: None if it is missing or damaged.
        problems: why the checkpoint cannot be used, as far as manifest and file sizes show; empty if it can.
    """

    iteration: int
    path: Path
    manifest: Manifest | None
    problems: tuple[str, ...]

    def content_problems(self, names: Iterable[str] | None = None) -> list[str]:
        """Compare the checksums of the files `names` (all of them by default); empty without a manifest."""
        if self.manifest is None:
            return []
        return manifest.content_problems(self.path, self.manifest, self.manifest.files if names is None else names)


def name_of(iteration: int) -> str:
    """Megatron's name for the checkpoint after `iteration` batches."""
    return f"iter_{iteration:07d}"


def checkpoints(root: Path) -> list[Found]:
    """Every checkpoint of a folder, newest first, judged by manifest and file sizes.

    In a folder without any manifest, written by Megatron, the checkpoint that its pointer names counts as complete.
    """
    if not root.is_dir():
        return []
    named = [(int(match[1]), path) for path in root.iterdir() if (match := _NAME.fullmatch(path.name))]
    found = [_judge(path, iteration) for iteration, path in sorted(named, reverse=True)]
    if any((entry.path / manifest.NAME).exists() for entry in found):
        return found
    trusted = tracked(root)
    return [Found(entry.iteration, entry.path, None, ()) if entry.iteration == trusted else entry for entry in found]


def newest(root: Path) -> Found | None:
    """The newest checkpoint that is complete as far as manifest and file sizes show."""
    return next((entry for entry in checkpoints(root) if not entry.problems), None)


def choose(
    known: Sequence[Found], root: Path, step: int | None, check: Callable[[Found], Sequence[str]] = lambda entry: ()
) -> tuple[Found | None, list[str]]:
    """The checkpoint that a run with `--load root --ckpt-step step` starts from, and warnings.

    Args:
        known: the folder's checkpoints, newest first.
        root: the folder.
        step: value of --ckpt-step; None takes the newest complete one.
        check: reads a checkpoint and returns its problems.

    Returns:
        None if there is none, or only a release checkpoint. The warnings name checkpoints that were skipped.

    Raises:
        ValueError: --ckpt-step names one that is missing or damaged, or all of them are damaged.
    """
    candidates = known if step is None else [entry for entry in known if entry.iteration == step]
    if step is not None and not candidates:
        there = ", ".join(str(entry.iteration) for entry in known) or "none"
        raise ValueError(f"--ckpt-step {step}: no such checkpoint in --load {root}; there: {there}.")
    damaged: list[tuple[Path, str]] = []
    for entry in candidates:
        if problems := entry.problems or check(entry):
            damaged.append((entry.path, "; ".join(problems)))
            continue
        warnings = [f"checkpoint {path} is skipped: {why}" for path, why in damaged]
        if entry.manifest is None:
            warnings.append(f"checkpoint {entry.path} has no {manifest.NAME}: it cannot be verified")
        return entry, warnings
    if step is not None:
        raise ValueError(f"--ckpt-step {step}: {damaged[0][0]} is damaged: {damaged[0][1]}.")
    if damaged and not is_release(root):
        # Starting from scratch would lose the run without a word.
        listed = "; ".join(f"{path.name}: {why}" for path, why in damaged)
        raise ValueError(
            f"--load {root}: none of its {len(damaged)} checkpoints is complete ({listed}). Repair or remove them, or "
            "leave --load out."
        )
    return None, []


def locate(path: Path, step: int | None = None) -> Path:
    """Folder of the checkpoint that a run with `--load path --ckpt-step step` starts from, after reading all of it.

    `path` may also be one checkpoint itself. Skipped checkpoints are named in the log.

    Raises:
        ValueError: as `choose`; there is no checkpoint of format torch_dist.
    """
    if (path / _FORMAT).is_file():
        if step is not None:
            raise ValueError(f"--ckpt-step {step}: --load {path} is one checkpoint. Give the folder that it is in.")
        entry = _judge(path, 0)
        if (path / manifest.NAME).exists() and (problems := entry.problems or entry.content_problems()):
            raise ValueError(f"--load {path} is damaged: {'; '.join(problems)}.")
        return path
    found, warnings = choose(checkpoints(path), path, step, Found.content_problems)
    for warning in warnings:
        _log.warning("%s", warning)
    chosen = found.path if found else path / _RELEASE if is_release(path) else path
    if not (chosen / _FORMAT).is_file():
        raise ValueError(
            f"--load {path}: no Megatron checkpoint of format torch_dist (looked for {chosen / _FORMAT}). Give the "
            "folder that --save wrote to, or one checkpoint in it."
        )
    return chosen


def tracked(root: Path) -> int | None:
    """The iteration that Megatron's pointer names; None without one, or for a release checkpoint."""
    text = _pointer(root)
    return int(text) if text.isdecimal() else None


def is_release(root: Path) -> bool:
    """Whether Megatron's pointer names a release checkpoint: weights alone, at iteration 0."""
    return _pointer(root) == _RELEASE


def staging(root: Path) -> Path:
    """The folder in which checkpoints of `root` are written."""
    return root / STAGING


def clean_staging(root: Path) -> None:
    """Empty the staging folder. First publish a complete checkpoint found there: only its renaming was lost."""
    folder = staging(root)
    if folder.is_dir():
        for path in folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and not (root / path.name).exists() and _is_complete(_judge(path, int(match[1]))):
                publish(root, int(match[1]))
                break
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def publish(root: Path, iteration: int) -> None:
    """Move a complete checkpoint from the staging folder to its final name, then update Megatron's pointer.

    An older one of the same iteration is moved aside before and removed after.
    """
    staged, final = staging(root) / name_of(iteration), root / name_of(iteration)
    if final.exists():
        os.replace(final, staging(root) / f"replaced_{name_of(iteration)}")
    os.replace(staged, final)
    sync_to_disk(root)
    write_atomically(root / TRACKER, str(iteration), sync=True)
    shutil.rmtree(staging(root), ignore_errors=True)


def expired(root: Path, *, keep_last: int, milestone: int | None) -> list[int]:
    """Iterations to delete: complete ones beyond the newest `keep_last`, except every `milestone`-th."""
    complete = [entry.iteration for entry in checkpoints(root) if not entry.problems]
    return [iteration for iteration in complete[keep_last:] if not milestone or iteration % milestone]


def delete(root: Path, iteration: int) -> None:
    """Remove a checkpoint. It is renamed first, so that a half-removed one is not taken for a damaged one."""
    path = root / name_of(iteration)
    if path.is_symlink():
        return  # it is kept elsewhere
    staging(root).mkdir(exist_ok=True)
    os.replace(path, staging(root) / f"expired_{name_of(iteration)}")
    shutil.rmtree(staging(root))


def _pointer(root: Path) -> str:
    try:
        return (root / TRACKER).read_text().strip()
    except (OSError, ValueError):
        return ""


def _judge(path: Path, iteration: int) -> Found:
    try:
        content = manifest.read(path)
    except ValueError as error:
        return Found(iteration, path, None, (str(error),))
    return Found(iteration, path, content, tuple(manifest.size_problems(path, content)))


def _is_complete(entry: Found) -> bool:
    return not entry.problems and not entry.content_problems()
