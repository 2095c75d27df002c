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
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_async.checkpoint import manifest
from megatron_async.checkpoint.manifest import Manifest
from megatron_async.files import sync_to_disk, write_atomically

TRACKER = "latest_checkpointed_iteration.txt"
STAGING = ".unfinished"
RELEASE = "release"
_NAME = re.compile(r"iter_(\d{7,})")
_FORMAT = "metadata.json"  # Megatron's, in every checkpoint of its distributed format

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """One checkpoint.

    Attributes:
        iteration: completed batches, from the folder's name; 0 for another name.
        path: its folder.
        manifest: None if it is missing or damaged.
        problems: why the checkpoint cannot be used, as far as manifest and file sizes show; empty if it can.
    """

    iteration: int
    path: Path
    manifest: Manifest | None
    problems: tuple[str, ...]

    def content_problems(self, names: Iterable[str] | None = None) -> list[str]:
        """Compare the checksums of some files, by default all; without a manifest there is nothing to compare."""
        if self.manifest is None:
            return []
        names = self.manifest.files if names is None else names
        return manifest.problems(self.path, self.manifest, names, contents=True)


def name_of(iteration: int) -> str:
    """Megatron's name for the checkpoint after `iteration` batches."""
    return f"iter_{iteration:07d}"


def judge(path: Path) -> Found:
    """One checkpoint, judged by manifest and file sizes."""
    iteration = int(path.name.removeprefix("iter_")) if _NAME.fullmatch(path.name) else 0
    try:
        content = manifest.read(path)
    except ValueError as error:
        return Found(iteration, path, None, (str(error),))
    return Found(iteration, path, content, tuple(manifest.problems(path, content, content.files, contents=False)))


def checkpoints(root: Path) -> list[Found]:
    """Every checkpoint of a folder, newest first, judged by manifest and file sizes.

    In a folder without any manifest, written by Megatron, checkpoints of its format torch_dist up to the one that its
    pointer names count as complete: Megatron moves the pointer last.
    """
    paths = [path for path in root.iterdir() if _NAME.fullmatch(path.name)] if root.is_dir() else []
    found = sorted(map(judge, paths), key=lambda entry: entry.iteration, reverse=True)
    if any((path / manifest.NAME).exists() for path in paths):
        return found
    trusted = pointer(root)
    last = int(trusted) if trusted.isdecimal() else -1
    other = (f"no {_FORMAT}: save it once with Megatron and --ckpt-format torch_dist",)
    return [
        replace(entry, problems=() if (entry.path / _FORMAT).is_file() else other) if entry.iteration <= last else entry
        for entry in found
    ]


def newest(root: Path) -> Found | None:
    """The newest checkpoint that is complete as far as manifest and file sizes show."""
    return next((entry for entry in checkpoints(root) if not entry.problems), None)


def choose(
    root: Path,
    step: int | None,
    check: Callable[[Found], Sequence[str]] = lambda entry: (),
    *,
    known: Sequence[Found] | None = None,
    warn: Callable[[str], object] = lambda text: None,
) -> Found | None:
    """The checkpoint that a run with `--load root --ckpt-step step` starts from; None for none, or only a release one.

    Args:
        step: None takes the newest complete checkpoint.
        check: reads a checkpoint and returns its problems.
        known: the folder's checkpoints, newest first; None looks for them.
        warn: receives a line about each checkpoint that is skipped or cannot be verified.

    Raises:
        ValueError: there is none of that step, or no complete one.
    """
    known = checkpoints(root) if known is None else known
    given = f"--load {root}" + ("" if step is None else f" --ckpt-step {step}")
    candidates = [entry for entry in known if step in (None, entry.iteration)]
    if step is not None and not candidates:
        there = ", ".join(str(entry.iteration) for entry in known) or "none"
        raise ValueError(f"{given}: no such checkpoint; there: {there}.")
    damaged: list[str] = []
    for entry in candidates:
        if problems := entry.problems or check(entry):
            damaged.append(f"{entry.path}: {'; '.join(problems)}")
            continue
        for why in damaged:
            warn(f"skipped a damaged checkpoint: {why}")
        if entry.manifest is None:
            warn(f"checkpoint {entry.path} has no {manifest.NAME}: it cannot be verified")
        return entry
    if damaged and pointer(root) != RELEASE:  # starting anew would lose the run without a word
        raise ValueError(
            f"{given}: no complete checkpoint. Repair or remove them, or start anew. Damaged: {' | '.join(damaged)}"
        )
    return None


def locate(path: Path, step: int | None = None) -> Path:
    """For tools: folder of the checkpoint that a run with `--load path --ckpt-step step` starts from, verified.

    `path` may also be one checkpoint. Skipped checkpoints are named in the log; errors as `choose`.
    """
    if (path / _FORMAT).is_file():
        if step is not None:
            raise ValueError(f"--ckpt-step {step}: --load {path} is one checkpoint. Give the folder that it is in.")
        if (path / manifest.NAME).exists():
            choose(path, None, Found.content_problems, known=[judge(path)])
        return path
    found = choose(path, step, Found.content_problems, warn=_log.warning)
    chosen = found.path if found else path / RELEASE if pointer(path) == RELEASE else path
    if not (chosen / _FORMAT).is_file():
        raise ValueError(
            f"--load {path}: no Megatron checkpoint of format torch_dist (looked for {chosen / _FORMAT}). Give the "
            "folder that --save wrote to, or one checkpoint in it."
        )
    return chosen


def pointer(root: Path) -> str:
    """Content of Megatron's pointer: an iteration, or "release" for weights alone; empty without one."""
    try:
        return (root / TRACKER).read_text().strip()
    except (OSError, ValueError):
        return ""


def clean_staging(root: Path) -> None:
    """Empty the staging folder. First publish a complete checkpoint found there: only its renaming was lost."""
    folder = root / STAGING
    for entry in checkpoints(folder):
        complete = entry.manifest and not entry.problems and not entry.content_problems()
        if complete and not (root / entry.path.name).exists():
            publish(root, entry.iteration)
            break
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)


def publish(root: Path, iteration: int) -> None:
    """Move a complete checkpoint from the staging folder to its final name, then update Megatron's pointer.

    An older one of the same iteration is moved aside before and removed after.
    """
    name = name_of(iteration)
    if (root / name).exists():
        os.replace(root / name, root / STAGING / f"replaced_{name}")
    os.replace(root / STAGING / name, root / name)
    sync_to_disk(root)
    write_atomically(root / TRACKER, str(iteration), sync=True)
    shutil.rmtree(root / STAGING, ignore_errors=True)


def expired(root: Path, newest: int, *, keep_last: int, milestone: int | None) -> list[int]:
    """Iterations to delete: complete ones beyond the last `keep_last` up to `newest`, except every `milestone`-th.

    `newest` is the iteration just saved. The run could not start from a later checkpoint, so that one does not count.
    """
    complete = [entry.iteration for entry in checkpoints(root) if not entry.problems and entry.iteration <= newest]
    return [iteration for iteration in complete[keep_last:] if not milestone or iteration % milestone]


def delete(root: Path, iteration: int) -> None:
    """Remove a checkpoint. It is renamed first, so that a half-removed one is not taken for a damaged one.

    What cannot be removed, such as a file that another program reads over NFS, is named in the log and stays.
    """
    path = root / name_of(iteration)
    if path.is_symlink():
        return  # it is kept elsewhere
    try:
        (root / STAGING).mkdir(exist_ok=True)
        os.replace(path, root / STAGING / f"expired_{path.name}")
        shutil.rmtree(root / STAGING)
    except OSError as error:
        _log.warning("> the old checkpoint %s could not be removed: %s", path, error)
