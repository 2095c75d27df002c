# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The manifest of a checkpoint: what is in it, and a checksum of every file. Plain files, no torch.

It is written last, when every other file is on the disk. A folder with an intact manifest whose files all agree with
it is a whole checkpoint, wherever it lies; anything else is half-written or damaged.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_async import files

NAME = "manifest.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Size in bytes and SHA-256 of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Contents of `manifest.json`.

    Attributes:
        iteration: completed batches.
        files: facts of each file by its path below the checkpoint's folder.
        arguments: the resolved arguments of the run that saved, as JSON values.
        versions: versions of the software that saved.
        wandb_run: id of the wandb run, to go on with it.
    """

    iteration: int
    files: Mapping[str, FileFacts]
    arguments: Mapping[str, Any]
    versions: Mapping[str, str]
    wandb_run: str | None = None


class ManifestError(ValueError):
    """A manifest that is missing, unreadable, or changed after it was written."""


def file_names(folder: Path) -> list[str]:
    """Paths of a checkpoint's files below its folder, sorted, without the manifest."""
    return sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path != folder / NAME
    )


def measure(folder: Path, names: Iterable[str], *, sync: bool = False) -> dict[str, FileFacts]:
    """Read files back and return their facts; with `sync`, force them to the disk before."""
    facts = {}
    for name in names:
        if sync:
            files.sync_to_disk(folder / name)
        with (folder / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        facts[name] = FileFacts((folder / name).stat().st_size, digest)
    return facts


def write(folder: Path, manifest: Manifest) -> None:
    """Write the manifest atomically and force it and the folder's entries to the disk."""
    body = json.dumps({"format": FORMAT, **asdict(manifest)}, sort_keys=True)
    files.write_atomically(folder / NAME, json.dumps({"checksum": _digest(body), "body": body}) + "\n", sync=True)


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        ManifestError: missing, unreadable or damaged.
    """
    try:
        outer = json.loads((folder / NAME).read_text())
        if _digest(outer["body"]) != outer["checksum"]:
            raise ManifestError(f"{NAME} does not agree with its own checksum")
        body = json.loads(outer["body"])
    except FileNotFoundError:
        raise ManifestError(f"{NAME} is missing, so the checkpoint was not completed") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ManifestError(f"{NAME} cannot be read: {error}") from None
    if body.pop("format") != FORMAT:
        raise ManifestError(f"{NAME} has another format than {FORMAT}, the one this version reads")
    body["files"] = {name: FileFacts(**facts) for name, facts in body["files"].items()}
    return Manifest(**body)


def size_problems(folder: Path, manifest: Manifest) -> list[str]:
    """Files that are missing or have another size than they had: found without reading them."""
    problems = []
    for name, facts in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError:
            problems.append(f"{name} is missing")
            continue
        if size != facts.bytes:
            problems.append(f"{name} has {size} bytes instead of {facts.bytes}")
    return problems


def content_problems(folder: Path, manifest: Manifest, names: Sequence[str]) -> list[str]:
    """Which of the files `names` cannot be read or have changed since they were written."""
    problems = []
    for name in names:
        try:
            digest = measure(folder, [name])[name].sha256
        except OSError as error:
            problems.append(f"{name} cannot be read: {error.strerror}")
            continue
        if digest != manifest.files[name].sha256:
            problems.append(f"{name} has changed: its checksum is not the one in {NAME}")
    return problems


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
