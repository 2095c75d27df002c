# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""One rank's error becomes every rank's error, with its cause.

Ranks exchange errors through the job's store, not by a collective: a rank that fails inside a collective of the others
could not take part in another one.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from megatron_async.mcore.parallel import store as job_store

# A failed rank waits this long for the causes of the others, then ends; they end with it.
_GRACE = timedelta(seconds=20)
# In the message of torch's archive writer when the disk took less than it was given.
_SHORT_WRITE = "unexpected pos"


class JointError(RuntimeError):
    """Raised on every rank; the message holds the causes of all ranks that failed."""


class Agreement:
    """Makes errors joint; waits `timeout_minutes` for a silent rank."""

    def __init__(self, timeout_minutes: float) -> None:
        self._timeout = timedelta(minutes=timeout_minutes)
        self._count = itertools.count()

    @contextlib.contextmanager
    def on_all_ranks(self, what: str) -> Iterator[None]:
        """Run the block on every rank; if it fails on one, raise a JointError that begins with `what`. Collective."""
        own = ""
        try:
            yield
        except (Exception, CheckpointException) as error:  # torch's is no Exception
            own = describe(error)
        if causes := self._exchange(own):
            raise JointError(f"{what}: {causes}" if what else causes)

    def on_first_rank(self, what: str, action: Callable[[], Any]) -> Any:
        """Run `action` on rank 0; return its result, or raise its error, on every rank. Collective."""
        box: list[Any] = [None]
        with self.on_all_ranks(what):
            if dist.get_rank() == 0:
                box[0] = action()
        dist.broadcast_object_list(box)
        return box[0]

    def _exchange(self, own: str) -> str:
        """The causes of all ranks in one line, empty if none failed. A few messages for each rank."""
        store: Any = job_store()
        prefix = f"megatron_async/agreement/{next(self._count)}/"
        if own:
            store.append(prefix + "causes", f"{dist.get_rank()} {own}\n")
        failures = store.add(prefix + "failures", bool(own))
        if store.add(prefix + "answers", 1) == dist.get_world_size():
            store.set(prefix + "complete", "")
        try:
            store.wait([prefix + "complete"], _GRACE if own else self._timeout)
            failures = store.add(prefix + "failures", 0)
        except RuntimeError as silence:
            if not failures:
                return f"a rank did not answer in time ({describe(silence)})"
        return _grouped(store.get(prefix + "causes").decode()) if failures else ""


def _grouped(lines: str) -> str:
    """Equal causes once, with the ranks that had them."""
    ranks: dict[str, list[int]] = {}
    for line in lines.splitlines():
        rank, _, cause = line.partition(" ")
        ranks.setdefault(cause, []).append(int(rank))
    return "; ".join(f"rank {', '.join(map(str, sorted(ranks[cause])))}: {cause}" for cause in sorted(ranks))


def describe(error: BaseException) -> str:
    """An error and its cause in one line, without traceback."""
    if isinstance(error, CheckpointException):  # torch's: one error and traceback for each rank
        return "; ".join(dict.fromkeys(describe(cause) for cause, _ in error.failures.values()))
    text = " ".join(str(error).split()) or repr(error)
    text = text if isinstance(error, JointError | ValueError) else f"{type(error).__name__}: {text}"
    if _SHORT_WRITE in text:
        text += " (a write was cut short, as happens when there is No space left on device)"
    return f"{text} ({describe(error.__cause__)})" if error.__cause__ is not None else text
