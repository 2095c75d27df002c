# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""One rank's error becomes every rank's error, with its cause.

Ranks tell each other through the store that they met by, not by a collective: a rank that fails in the middle of
somebody else's collective operations could not take part in one more.
"""

import contextlib
import itertools
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from megatron_async.mcore.parallel import store as job_store

# How long a failed rank waits for the others' own causes before it ends; they end with it.
_GRACE = timedelta(seconds=20)


class JointError(RuntimeError):
    """Raised on every rank; the message holds the causes of all ranks that had one."""


class Agreement:
    """Makes errors joint.

    Args:
        timeout_minutes: how long a rank waits for one that says nothing.
    """

    def __init__(self, timeout_minutes: float) -> None:
        self._timeout = timedelta(minutes=timeout_minutes)
        self._count = itertools.count()

    @contextlib.contextmanager
    def on_all_ranks(self, what: str) -> Iterator[None]:
        """Run the block on every rank; if it fails on one, raise on all. Collective.

        Args:
            what: beginning of the message, what was tried.

        Raises:
            JointError: the block failed somewhere.
        """
        own = ""
        try:
            yield
        except (Exception, CheckpointException) as error:  # torch's is no Exception
            own = describe(error)
        causes = self._exchange(own)
        if causes:
            raise JointError(f"{what}: {causes}" if what else causes)

    def _exchange(self, own: str) -> str:
        """Every rank's causes in one line; empty if there is none. A few messages for each rank."""
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
    ranks: dict[str, list[int]] = {}
    for line in lines.splitlines():
        rank, _, cause = line.partition(" ")
        ranks.setdefault(cause, []).append(int(rank))
    return "; ".join(
        f"rank {', '.join(map(str, sorted(numbers)))}: {cause}" for cause, numbers in sorted(ranks.items())
    )


# How torch's archive writer reports that the disk took less than it was given.
_SHORT_WRITE = "unexpected pos"


def describe(error: BaseException) -> str:
    """One line for an error and what caused it, without a traceback."""
    if isinstance(error, CheckpointException):  # torch's: one error and traceback for each rank
        causes = dict.fromkeys(describe(cause) for cause, _ in error.failures.values())
        return "; ".join(causes)
    text = " ".join(str(error).split()) or repr(error)
    text = text if isinstance(error, JointError | ValueError) else f"{type(error).__name__}: {text}"
    if _SHORT_WRITE in text:
        text += " (a write was cut short, as happens when there is No space left on device)"
    return f"{text} ({describe(error.__cause__)})" if error.__cause__ is not None else text
