# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""manifest.json of a checkpoint: its contents and a checksum of every file. Plain files, no torch.

It is written last, when every other file is on the disk. A checkpoint is complete if its manifest is intact and every
file agrees with it.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_async.files import sync_to_disk, write_atomically

NAME = "manifest.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Size in bytes and SHA-256 of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Contents of manifest.json.

    Attributes:
        iteration: completed batches.
        files: facts of each file by its path below the checkpoint's folder.
        arguments: resolved arguments of the run, as JSON values.
        versions: versions of the software.
        wandb_run: id of the wandb run.
    """

    iteration: int
    files: Mapping[str, FileFacts]
    arguments: Mapping[str, Any]
    versions: Mapping[str, str]
    wandb_run: str | None = None


def file_names(folder: Path) -> list[str]:
    """Sorted paths of a checkpoint's files below its folder, without the manifest."""
    return sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path != folder / NAME
    )


def measure(folder: Path, names: Iterable[str], *, sync: bool = False) -> dict[str, FileFacts]:
    """Read files and return their facts; with `sync`, force them to the disk first."""
    facts = {}
    for name in names:
        if sync:
            sync_to_disk(folder / name)
        with (folder / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        facts[name] = FileFacts((folder / name).stat().st_size, digest)
    return facts


def write(folder: Path, manifest: Manifest) -> None:
    """Write the manifest atomically and force it and the folder's entries to the disk."""
    body = json.dumps({"format": FORMAT, **asdict(manifest)}, sort_keys=True)
    write_atomically(folder / NAME, json.dumps({"checksum": _digest(body), "body": body}) + "\n", sync=True)


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        ValueError: missing, unreadable or damaged.
    """
    try:
        outer = json.loads((folder / NAME).read_text())
        body, checksum = str(outer["body"]), outer["checksum"]
    except FileNotFoundError:
        raise ValueError(f"{NAME} is missing, so the checkpoint was not completed") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{NAME} cannot be read: {error}") from None
    if _digest(body) != checksum:
        raise ValueError(f"{NAME} does not agree with its own checksum")
    contents = json.loads(body)
    if contents.pop("format") != FORMAT:
        raise ValueError(f"{NAME} has another format than {FORMAT}, the one this version reads")
    contents["files"] = {name: FileFacts(**facts) for name, facts in contents["files"].items()}
    return Manifest(**contents)


def size_problems(folder: Path, manifest: Manifest) -> list[str]:
    """Files that are missing or have another size than the manifest says; reads no file."""
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


def content_problems(folder: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """The files among `names` that cannot be read or have another checksum than the manifest says."""
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
