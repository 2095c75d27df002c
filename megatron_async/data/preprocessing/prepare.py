# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""From the standard library's source to a tokenizer and Megatron data files, built once and then reused."""

import fcntl
import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import batched
from pathlib import Path
from typing import Any

import tokenizers
from rich.console import Console
from rich.progress import track

from megatron_async.data.preprocessing.stdlib_corpus import Texts, read_corpus
from megatron_async.data.preprocessing.tokenizer import END_OF_DOCUMENT, TOKENIZER_TYPE, save_tokenizer, train_tokenizer

# Raised when the same input would give other files; older folders are then rebuilt.
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER_FOLDER = "tokenizer"
PREFIXES = {part: f"{part}_text_document" for part in ("train", "valid")}
# Index caches: ours, and the one that Megatron keeps in a folder named like the data prefix.
_OWN_ENTRIES = {MANIFEST, TOKENIZER_FOLDER, "index_cache", *PREFIXES.values()}
_OWN_ENTRIES |= {f"{prefix}{ending}" for prefix in PREFIXES.values() for ending in (".bin", ".idx")}
_ENCODE_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class PartCounts:
    """Size of one part of the corpus: documents, bytes of text, tokens including the end-of-document tokens."""

    documents: int
    bytes: int
    tokens: int


@dataclass(frozen=True, slots=True)
class CorpusPaths:
    """A prepared corpus.

    Attributes:
        folder: holds everything below.
        train_prefix, valid_prefix: Megatron data prefixes of the training part and the held-out part.
        tokenizer: Hugging Face tokenizer folder.
        vocab_size: tokens in the vocabulary, special ones included.
        train, valid: sizes of the parts.
    """

    folder: Path
    train_prefix: str
    valid_prefix: str
    tokenizer: Path
    vocab_size: int
    train: PartCounts
    valid: PartCounts

    def megatron_arguments(self) -> list[str]:
        """Command-line arguments for a run on this corpus."""
        return [
            *("--tokenizer-type", TOKENIZER_TYPE, "--tokenizer-model", str(self.tokenizer)),
            *("--train-data-path", self.train_prefix, "--valid-data-path", self.valid_prefix),
        ]


def prepare_corpus(folder: str | Path, vocab_size: int = 4096, *, root: Path | None = None) -> CorpusPaths:
    """Return the corpus, its tokenizer and its data files in `folder`, building them if they are not there.

    Existing files are reused if their manifest names the same interpreter, source files, vocabulary size and format,
    and every file has the recorded digest. Anything else is rebuilt beside `folder` and swapped in, so an interrupted
    build leaves no folder that looks complete. Of several processes one builds and the others wait.

    Args:
        folder: created if missing. To build, its parent must be writable.
        vocab_size: most tokens that the vocabulary may have.
        root: folder of `*.py` files to read instead of the standard library.

    Raises:
        ValueError: `folder` holds foreign files, `vocab_size` is too small or `root` has too few files.
    """
    folder = Path(folder)
    parts = dict(zip(PREFIXES, read_corpus(root), strict=True))
    digest = _digest(parts, vocab_size)
    manifest = _valid_manifest(folder, digest)
    if manifest is None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / f".{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the system releases it when the process dies
            # Another process may have built it while this one waited.
            manifest = _valid_manifest(folder, digest) or _rebuild(folder, parts, vocab_size, digest)
    return CorpusPaths(
        folder=folder,
        train_prefix=str(folder / PREFIXES["train"]),
        valid_prefix=str(folder / PREFIXES["valid"]),
        tokenizer=folder / TOKENIZER_FOLDER,
        vocab_size=manifest["vocab_size"],
        train=PartCounts(**manifest["train"]),
        valid=PartCounts(**manifest["valid"]),
    )


def _refuse_foreign_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file. Name a folder for the corpus, new or written by an earlier call.")
    entries = folder.iterdir() if folder.exists() else ()
    foreign = sorted(entry.name for entry in entries if entry.name not in _OWN_ENTRIES)
    if foreign:
        raise ValueError(
            f"{folder} holds {len(foreign)} entries that do not belong to a prepared corpus "
            f"({', '.join(foreign[:5])}). It is replaced as a whole when it is rebuilt: name an empty or new folder."
        )


def _digest(parts: Mapping[str, Texts], vocab_size: int) -> str:
    """Digest of everything that the built files depend on."""
    identity = {
        "format": FORMAT_VERSION,
        "python": platform.python_version(),
        "tokenizers": tokenizers.__version__,
        "vocab_size": vocab_size,
        "files": parts,
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _valid_manifest(folder: Path, digest: str) -> dict[str, Any] | None:
    """The folder's manifest, if it has this digest and every file is unchanged."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        files = manifest["files"].items()
        valid = manifest["digest"] == digest and all(_file_digest(folder / name) == written for name, written in files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return manifest if valid else None


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _rebuild(folder: Path, parts: Mapping[str, Texts], vocab_size: int, digest: str) -> dict[str, Any]:
    """Build beside `folder` and swap the result in. The caller holds the lock."""
    _refuse_foreign_folder(folder)
    for leftover in folder.parent.glob(f".{folder.name}.building-*"):  # of killed builds
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.building-", dir=folder.parent))
    try:
        temporary.chmod(0o755)
        manifest = {"digest": digest, **_build(temporary, parts, vocab_size)}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
        if folder.exists():
            # Named like a leftover, so that the next build removes it if this process dies in between.
            os.rename(folder, f"{temporary}-replaced")
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(f"{temporary}-replaced", ignore_errors=True)
    return manifest


def _build(folder: Path, parts: Mapping[str, Texts], vocab_size: int) -> dict[str, Any]:
    console = Console(stderr=True)
    with console.status("Training the tokenizer"):
        tokenizer = train_tokenizer(parts["train"].values(), vocab_size)
    save_tokenizer(tokenizer, folder / TOKENIZER_FOLDER)
    counts = {
        part: asdict(_write_part(folder / PREFIXES[part], list(texts.values()), tokenizer, console))
        for part, texts in parts.items()
    }
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    digests = {path.relative_to(folder).as_posix(): _file_digest(path) for path in files}
    return {"vocab_size": tokenizer.get_vocab_size(), **counts, "files": digests}


def _write_part(prefix: Path, texts: Sequence[str], tokenizer: tokenizers.Tokenizer, console: Console) -> PartCounts:
    from megatron_async.data.preprocessing.indexed import IndexedWriter  # imports Megatron, which takes seconds

    end = tokenizer.token_to_id(END_OF_DOCUMENT)
    assert end is not None
    with IndexedWriter(str(prefix), tokenizer.get_vocab_size()) as writer:
        batches = list(batched(texts, _ENCODE_AT_ONCE))
        for batch in track(batches, "Tokenizing", console=console, transient=True, disable=not console.is_terminal):
            for encoding in tokenizer.encode_batch_fast(list(batch)):
                writer.add([*encoding.ids, end])
        writer.commit()
    return PartCounts(writer.documents, sum(len(text.encode()) for text in texts), writer.tokens)
