# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Each rank's last action in the job's store, and the table that the rank prints which ends first.

On GPUs a silent peer raises no error in Python: NCCL's watchdog ends the process at the timeout. The table is therefore
also printed by a rank that has begun no action for half of the timeout.
"""

import json
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from megatron_async.mcore.parallel import store as job_store
from megatron_async.training.callbacks import Callback

if TYPE_CHECKING:
    from megatron_async.training.loop import Loop

_INTERVAL = 1.0
"""Seconds between two messages of a rank to the store."""
_SILENT = 5.0
"""A process whose message is so many seconds older than the newest one is stopped, gone, or cut off."""
_STORE_ANSWERS = 5.0
"""Seconds to wait for the store, which lives in the process of rank 0 or in its launcher."""
_MOST_ROWS = 16


@dataclass(frozen=True, slots=True)
class Entry:
    """A rank's last action. Times are those of the clock of its host.

    Attributes:
        action: F, B, R or U; "evaluation" or "save"; "start".
        batch: its batch; for evaluations and saves the number of completed batches.
        began: when it began.
        done: whether it is over and the rank waits for its next input.
        published: when the rank last wrote to the store.
    """

    rank: int
    host: str
    action: str
    batch: int
    began: float
    done: bool = False
    published: float = 0.0

    @property
    def what(self) -> str:
        return f"{'after ' if self.done else ''}{self.action} of batch {self.batch}"


class Board:
    """The entries of all ranks.

    Args:
        store: a connection of its own: an operation that waits holds up all others of its connection.
    """

    def __init__(self, store: Any, ranks: int) -> None:
        self._store, self._ranks = store, ranks

    def publish(self, entry: Entry) -> None:
        """Write the entry of this rank, dated now."""
        self._store.set(self._key(entry.rank), json.dumps(asdict(entry) | {"published": time.time()}))

    def read(self) -> list[Entry]:
        """The entries of all ranks that have begun."""
        keys = [self._key(rank) for rank in range(self._ranks)]
        if not self._store.check(keys):
            keys = [key for key in keys if self._store.check([key])]
        return [Entry(**json.loads(text)) for text in self._store.multi_get(keys)] if keys else []

    def is_first(self, occasion: str) -> bool:
        """Whether no rank has asked this before."""
        return bool(self._store.add(f"megatron_async/last_actions/{occasion}", 1) == 1)

    def _key(self, rank: int) -> str:
        return f"megatron_async/last_action/{rank}"


def by_suspicion(entries: Sequence[Entry]) -> list[Entry]:
    """The rank that the others most likely wait for comes first.

    A process that no longer writes to the store; then the oldest forward or backward, update or reduction (these may
    wait for other ranks), and the oldest rank that waits for its input.
    """
    newest = max(entry.published for entry in entries)

    def suspicion(entry: Entry) -> tuple[bool, bool, bool, float]:
        computes = entry.action in ("F", "B") and not entry.done
        return newest - entry.published <= _SILENT, entry.done, not computes, entry.began

    return sorted(entries, key=suspicion)


def table(entries: Sequence[Entry], title: str) -> Table:
    """The first rows of `by_suspicion`."""
    newest = max(entry.published for entry in entries)
    rows = Table("rank", "host", "last action", "seconds since", "process", title=title, title_justify="left")
    for entry in by_suspicion(entries)[:_MOST_ROWS]:
        silence = newest - entry.published
        process = "answers" if silence <= _SILENT else f"silent for {silence:.0f} s"
        rows.add_row(str(entry.rank), entry.host, entry.what, f"{newest - entry.began:.1f}", process)
    if len(entries) > _MOST_ROWS:
        rows.caption = f"and {len(entries) - _MOST_ROWS} more ranks"
    return rows


class LastActions(Callback):
    """Publishes this rank's last action about once a second, from a thread of its own.

    Args:
        timeout: seconds after which collectives and transfers of the run fail.
    """

    def __init__(self, timeout: float) -> None:
        self._stalls_after = timeout / 2
        self._own = Entry(dist.get_rank(), socket.gethostname(), "start", 0, time.time())
        self._board: Board | None = None
        self._over = threading.Event()

    def on_train_begin(self, loop: "Loop") -> None:
        self._begin("start", loop.args.iteration)
        self._board = Board(job_store().clone(), dist.get_world_size())
        self._board.publish(self._own)  # a rank may stop before the thread's first turn
        threading.Thread(target=self._watch, args=(self._board,), name="last actions", daemon=True).start()

    def on_action(self, kind: str, batch: int) -> None:
        self._begin(kind, batch)

    def on_action_end(self) -> None:
        self._own = replace(self._own, done=True)

    def on_evaluation_begin(self, iteration: int) -> None:
        self._begin("evaluation", iteration)

    def on_evaluation_end(self, iteration: int, loss: float | None) -> None:
        self.on_action_end()

    def on_save_begin(self, iteration: int) -> None:
        self._begin("save", iteration)

    def on_save_end(self, iteration: int) -> None:
        self.on_action_end()

    def on_train_end(self, complete: bool) -> None:
        self._over.set()
        if complete or self._board is None:
            return
        # The report may hang with the store; the process then ends without it.
        report = threading.Thread(target=self._report_failure, args=(self._board,), daemon=True)
        report.start()
        report.join(_STORE_ANSWERS)
        if report.is_alive():
            sys.stderr.write("megatron_async: the job's store does not answer: rank 0 is stopped or cut off\n")

    def _begin(self, action: str, batch: int) -> None:
        self._own = replace(self._own, action=action, batch=batch, began=time.time(), done=False)

    def _watch(self, board: Board) -> None:
        """Body of the thread."""
        reported: Entry | None = None
        try:
            while not self._over.wait(_INTERVAL):
                own = self._own
                board.publish(own)
                seconds = time.time() - own.began
                # Evaluations and saves have no actions and may take long.
                if own.action in ("F", "B", "R", "U") and seconds > self._stalls_after and own != reported:
                    reported = own
                    self._report(board, f"stalled/{own.batch}", f"no new action for {seconds:.0f} s on rank {own.rank}")
        except RuntimeError:
            return  # the store is gone: the job ends

    def _report_failure(self, board: Board) -> None:
        try:
            self._report(board, "failed", f"rank {self._own.rank} failed")
        except RuntimeError as error:
            sys.stderr.write(f"megatron_async: the job's store does not answer: {error}\n")

    def _report(self, board: Board, occasion: str, reason: str) -> None:
        """Print the table, if this rank is the first one to do so on this occasion."""
        board.publish(self._own)
        if not board.is_first(occasion):
            return
        entries = board.read()
        suspect = by_suspicion(entries)[0]
        title = f"{reason}. Longest silent: rank {suspect.rank} ({suspect.host}), {suspect.what}"
        Console(file=sys.stderr, width=None if sys.stderr.isatty() else 140).print(table(entries, title))
