# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Folders for Megatron's sample orders that keep stale and incomplete files out.

Megatron names a cached order by path, seed, sequence length and the like, not by content, and takes every file of that
name as complete. Data rewritten under an old name would be read in the order of other documents, and a run killed while
it writes would break the next one. So the folder is named by the content of the indices, and a marker shows a build
that did not end.
"""

import contextlib
import errno
import fcntl
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch.distributed as dist

from megatron_async.data.blend import DataSources, is_local

_SAMPLE_BYTES = 1 << 20
_MARKER = ".building"
_LOCK = ".lock"


def cache_folder(prefixes: Sequence[str], chosen: str | None) -> str:
    """Folder for the sample orders of these data sets.

    An order depends on the lengths of the documents only, so on the `.idx` files. Their sizes and first and last MiB
    make the name, the same on every machine that reads the same data.

    Args:
        prefixes: data prefixes, at least one.
        chosen: `--data-cache-path`; None takes `index_cache` beside the first prefix.
    """
    base = Path(prefixes[0]).parent / "index_cache" if chosen is None else Path(chosen)
    return str(base / _digest(zip(prefixes, prefixes, strict=True))[:16])


def contents(sources: DataSources) -> str | None:
    """Digest of what the order of training samples depends on, wherever the files are; None if they are not local."""
    blend = sources.blend if sources.per_split is None else sources.per_split[0]
    if blend is None or not all(is_local(prefix) for prefix in blend.prefixes):
        return None
    weights: Sequence[object] = blend.weights or [None] * len(blend.prefixes)
    return _digest(zip(blend.prefixes, weights, strict=True))


def _digest(sets: Iterable[tuple[str, object]]) -> str:
    """Digest of the indices of data prefixes, each with what else tells it from others."""
    digest = hashlib.sha256()
    for prefix, more in sets:
        with open(f"{prefix}.idx", "rb") as file:
            size = file.seek(0, 2)
            digest.update(f"{more} {size}\n".encode())
            for start in (0, max(0, size - _SAMPLE_BYTES)):
                file.seek(start)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


@contextlib.contextmanager
def building(folder: str | None) -> Iterator[None]:
    """Lock the folder while its files are built or read for the first time; remove what a killed build left.

    Global rank 0 alone writes to it. A folder without write permission is left alone: a complete cache can be read from
    it.
    """
    if folder is None or (dist.is_initialized() and dist.get_rank() != 0):
        yield
        return
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / _LOCK).open("w")
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        yield
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        marker = path / _MARKER
        if marker.exists():
            for torn in (*path.glob("*.npy"), *path.glob("*.txt")):
                torn.unlink()
        marker.touch()
        yield
        marker.unlink()
