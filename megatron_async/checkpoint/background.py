# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Writes a checkpoint in a thread of each rank, beside training or not.

The threads use no collective. Each rank writes its part, forces it to the disk, reads it back and leaves a note in the
job's store; rank 0 publishes the checkpoint when every note is there.
"""

import contextlib
import pickle
import threading
import time
import zlib
from collections import ChainMap
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.checkpoint import CheckpointException

from megatron_async.checkpoint import manifest
from megatron_async.checkpoint.manifest import Facts
from megatron_async.mcore.checkpoint import CheckpointPart

_POLL_SECONDS = 0.02

Entries = Sequence[list[Any]]
"""Results of `CheckpointPart.write` on every rank, by rank."""


class Writing:
    """A checkpoint that is being written.

    Args:
        part: this rank's part.
        publish: completes the checkpoint, given the entries and the facts of all files; called on rank 0 alone.
        iteration: completed batches.
        name: of this save in the job's store, the same on every rank.
        rank, ranks, store: of the job.
        timeout_minutes: how long rank 0 waits for the other ranks.
    """

    def __init__(
        self,
        part: CheckpointPart,
        publish: Callable[[Entries, Facts], None],
        *,
        iteration: int,
        name: str,
        rank: int,
        ranks: int,
        store: Any,
        timeout_minutes: float,
    ) -> None:
        self.iteration = iteration
        self._part, self._publish, self._rank, self._store = part, publish, rank, store
        self._failed = f"megatron_async/{name}/failed"
        self._keys = [f"megatron_async/{name}/{other}" for other in range(ranks)]
        self._seconds = 60.0 * timeout_minutes
        self.error: BaseException | None = None
        """The error of this rank's thread, so far."""
        self._thread = threading.Thread(target=self._run, name=f"checkpoint {iteration}", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until this rank's part is written, on rank 0 until the checkpoint is published; raise their error."""
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            results = self._part.write()
            written = manifest.measure(self._part.folder, [self._part.file] if results else [], sync=True)
            self._store.set(self._keys[self._rank], zlib.compress(pickle.dumps((results, written))))
            if self._rank == 0 and (notes := self._notes()) is not None:
                entries, files = zip(*notes, strict=True)
                self._publish(entries, dict(ChainMap(*files)))
        except (Exception, CheckpointException) as error:  # torch's is no Exception
            self.error = error
            with contextlib.suppress(Exception):
                self._store.set(self._failed, "")

    def _notes(self) -> list[tuple[list[Any], Facts]] | None:
        """Every rank's results and facts; None as soon as a rank has failed; TimeoutError names silent ranks."""
        deadline = time.monotonic() + self._seconds
        while not self._store.check(self._keys):
            if self._store.check([self._failed]):
                return None
            if time.monotonic() > deadline:
                missing = [str(rank) for rank, key in enumerate(self._keys) if not self._store.check([key])]
                raise TimeoutError(f"rank {', '.join(missing)} did not write its part in {self._seconds / 60:g} min")
            time.sleep(_POLL_SECONDS)
        notes = [pickle.loads(zlib.decompress(self._store.get(key))) for key in self._keys]
        for key in self._keys:
            self._store.delete_key(key)
        return notes
