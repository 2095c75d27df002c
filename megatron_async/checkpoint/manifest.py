# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""manifest.json of a checkpoint: its contents and a checksum of every file. Plain files, no torch.

It is written last, when every other file is on the disk. A checkpoint is complete if its manifest is intact and every
file agrees with it.
"""

import argparse
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


Facts = dict[str, FileFacts]
"""By path below the checkpoint's folder."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Contents of manifest.json.

    Attributes:
        iteration: completed batches.
        files: facts of every other file.
        arguments: resolved arguments of the run, as JSON values.
        versions: versions of the software.
        wandb_run: id of the wandb run.
    """

    iteration: int
    files: Facts
    arguments: Mapping[str, Any]
    versions: Mapping[str, str]
    wandb_run: str | None = None


def json_value(value: Any) -> Any:
    """An argument's value in JSON; other types as text."""
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def arguments_as_json(args: argparse.Namespace) -> dict[str, Any]:
    """All public arguments by name as JSON values, except those that differ by rank."""
    names = sorted(name for name in vars(args) if not name.startswith("_") and name not in ("rank", "local_rank"))
    return {name: json_value(getattr(args, name)) for name in names}


def file_names(folder: Path) -> list[str]:
    """Sorted paths of a checkpoint's files below its folder, without the manifest."""
    return sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path != folder / NAME
    )


def measure(folder: Path, names: Iterable[str], *, sync: bool = False) -> Facts:
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
    """The manifest of a checkpoint; ValueError if it is missing, unreadable or damaged."""
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


def problems(folder: Path, manifest: Manifest, names: Iterable[str], *, contents: bool) -> list[str]:
    """The files among `names` that are missing or have changed: by size, with `contents` by checksum too."""
    found = []
    for name in names:
        expected = manifest.files[name]
        try:
            size = (folder / name).stat().st_size
            facts = measure(folder, [name])[name] if contents and size == expected.bytes else expected
        except OSError as error:
            found.append(f"{name} cannot be read: {error.strerror}")
            continue
        if size != expected.bytes:
            found.append(f"{name} has {size} bytes instead of {expected.bytes}")
        elif facts != expected:
            found.append(f"{name} has changed: its checksum is not the one in {NAME}")
    return found


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
