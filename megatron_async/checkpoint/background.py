# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Writing a checkpoint in a thread of each rank, while training goes on or not.

No rank waits for another in a collective. A rank whose part is written, forced to the disk and read back leaves a
note in the store that the job's processes met by; rank 0 publishes when every note is there. What fails is kept for
`Writing.wait`, which the training loop calls where all ranks do.
"""

import contextlib
import pickle
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint import CheckpointException

from megatron_async.checkpoint import manifest
from megatron_async.checkpoint.manifest import FileFacts
from megatron_async.mcore.checkpoint import CheckpointPart

_POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Written:
    """What a rank has written of a checkpoint.

    Attributes:
        results: for the index, as `CheckpointPart.write` returns them.
        files: size and checksum of its file, as read back from the disk; empty if it had nothing to write.
    """

    results: list[Any]
    files: dict[str, FileFacts]


class Notes:
    """One note of each rank about one save, in the job's store. Reading and writing them waits for nobody.

    Args:
        name: of the save, the same on every rank.
        rank, ranks: this rank, and their number.
        store: that the job's processes met by.
    """

    def __init__(self, name: str, *, rank: int, ranks: int, store: Any) -> None:
        self.rank, self._store = rank, store
        self._failed = f"megatron_async/{name}/failed"
        self._keys = [f"megatron_async/{name}/{other}" for other in range(ranks)]

    def leave(self, note: bytes) -> None:
        self._store.set(self._keys[self.rank], note)

    def give_up(self) -> None:
        """Tell whoever collects the notes that this rank's will not come."""
        self._store.set(self._failed, "")

    def collect(self, seconds: float) -> list[bytes] | None:
        """Every rank's note, by rank; None as soon as a rank has given up.

        Raises:
            TimeoutError: after so many seconds, naming the ranks that have left none.
        """
        deadline = time.monotonic() + seconds
        while not self._store.check(self._keys):
            if self._store.check([self._failed]):
                return None
            if time.monotonic() > deadline:
                missing = [str(rank) for rank, key in enumerate(self._keys) if not self._store.check([key])]
                raise TimeoutError(f"rank {', '.join(missing)} did not write its part in {seconds / 60:g} min")
            time.sleep(_POLL_SECONDS)
        notes = [self._store.get(key) for key in self._keys]
        for key in self._keys:
            self._store.delete_key(key)
        return notes


class Writing:
    """A checkpoint on its way to the disk.

    Args:
        iteration: completed batches.
        part: what this rank writes.
        notes: of this save.
        publish: given what every rank has written, completes the checkpoint; called on rank 0 alone.
        timeout_minutes: how long rank 0 waits for the other ranks' parts.
    """

    def __init__(
        self,
        *,
        iteration: int,
        part: CheckpointPart,
        notes: Notes,
        publish: Callable[[Sequence[Written]], None],
        timeout_minutes: float,
    ) -> None:
        self.iteration = iteration
        self._part, self._notes, self._publish, self._seconds = part, notes, publish, 60.0 * timeout_minutes
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"checkpoint {iteration}", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether this rank has had an error so far."""
        return self._error is not None

    def wait(self) -> None:
        """Wait until this rank has done its share; on rank 0, until the checkpoint is published.

        Raises:
            OSError, or whatever stood in the way on this rank.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._notes.leave(zlib.compress(pickle.dumps(self._write())))
            if self._notes.rank == 0 and (notes := self._notes.collect(self._seconds)) is not None:
                self._publish([pickle.loads(zlib.decompress(note)) for note in notes])
        except (Exception, CheckpointException) as error:  # torch's is no Exception
            self._error = error
            with contextlib.suppress(Exception):
                self._notes.give_up()

    def _write(self) -> Written:
        results = self._part.write()
        names = [self._part.file] if results else []
        return Written(results, manifest.measure(self._part.folder, names, sync=True))
