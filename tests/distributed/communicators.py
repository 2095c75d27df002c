# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""NCCL's rules about communicators, kept by a layer over gloo.

1. A communicator is made at its first operation, which blocks the host until all of its ranks are there. Collectives of
   a group share one; messages have one for each unordered pair of ranks, or share that of the group where a device is
   bound to the job ("bound").
2. A communicator is one queue: an operation starts when the one before it in the queue is complete.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from unittest import mock

from tests.distributed.jobs import Outcome, train

SECONDS = 15.0
"""Longest that a rank waits for another one to make a communicator or to finish an operation."""


class Queued:
    """A handle of an operation in a queue."""

    def __init__(self, future: "Future[None]") -> None:
        self._future = future

    def is_completed(self) -> bool:
        return self._future.done()

    def wait(self, timeout: Any = None) -> bool:
        try:
            self._future.result(timeout=SECONDS)
        except TimeoutError:
            raise RuntimeError(f"an operation did not end within {SECONDS} s") from None
        return True


class Communicators:
    """The communicators of this rank.

    Args:
        bound: whether messages share the communicator of their group.
    """

    def __init__(self, bound: bool) -> None:
        import torch.distributed as dist

        self._dist, self._bound = dist, bound
        self._queues: dict[tuple[str, tuple[int, ...]], ThreadPoolExecutor] = {}

    def run(self, group: Any, peer: int | None, operation: Callable[[], Any]) -> Queued:
        group = group or self._dist.group.WORLD
        ranks = tuple(self._dist.get_process_group_ranks(group))
        if peer is not None and not self._bound:
            ranks = tuple(sorted((self._dist.get_rank(), peer)))
        kind = "messages" if peer is not None and not self._bound else "group"
        key = f"{group.group_name} {kind}", ranks
        if key not in self._queues:
            self._meet(key)
            self._queues[key] = ThreadPoolExecutor(max_workers=1)
        return Queued(self._queues[key].submit(lambda: operation() and None))

    def _meet(self, key: tuple[str, tuple[int, ...]]) -> None:
        store = self._dist.distributed_c10d._get_default_store()
        name, deadline = f"communicator/{key}", time.monotonic() + SECONDS
        store.add(name, 1)
        while store.add(name, 0) < len(key[1]):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the communicator of {key} was not made by all of its ranks")
            time.sleep(0.002)


@contextlib.contextmanager
def nccl_rules(bound: bool) -> Iterator[None]:
    """Inside, torch.distributed keeps the rules. For one run: it ends with its process groups."""
    import torch.distributed as dist

    communicators = Communicators(bound)
    names = "isend irecv send recv all_reduce broadcast reduce_scatter_tensor all_gather_into_tensor".split()
    originals: dict[str, Any] = {name: getattr(dist, name) for name in names}

    def message(name: str) -> Callable[..., Any]:
        def call(tensor: Any, dst: Any = None, src: Any = None, group: Any = None, **options: Any) -> Any:
            peer = dst if dst is not None else src
            work = communicators.run(group, peer, lambda: originals["send"](tensor, peer, group=group))
            return work if name.startswith("i") else work.wait()

        return call

    def receive(name: str) -> Callable[..., Any]:
        def call(tensor: Any, src: Any = None, group: Any = None, **options: Any) -> Any:
            work = communicators.run(group, src, lambda: originals["recv"](tensor, src, group=group))
            return work if name.startswith("i") else work.wait()

        return call

    def collective(name: str) -> Callable[..., Any]:
        def call(*args: Any, group: Any = None, async_op: bool = False, **options: Any) -> Any:
            work = communicators.run(group, None, lambda: originals[name](*args, group=group, **options))
            if async_op:
                return work
            work.wait()
            return None

        return call

    ruled = {name: message(name) for name in ("isend", "send")}
    ruled |= {name: receive(name) for name in ("irecv", "recv")} | {name: collective(name) for name in names[4:]}
    with mock.patch.multiple(dist, **ruled):
        yield


def train_under_nccl_rules(arguments: Sequence[str], bound: bool) -> Outcome:
    """`train` where communicators are made and queue as NCCL's do."""
    with nccl_rules(bound):
        return train(arguments)


def train_as_before(arguments: Sequence[str], bound: bool) -> Outcome:
    """The faults put back: communicators made at first use, receives posted before the first compute."""
    from megatron_async.pipeline.links import Link, StageLinks
    from megatron_async.platform import groups

    expect = Link.expect

    def and_post(link: Link, messages: int) -> None:
        expect(link, messages)
        link._post()

    with (
        mock.patch.object(groups, "make_communicator", lambda group, edge=None: None),
        mock.patch.object(StageLinks, "post_ahead", lambda self, value: None),
        mock.patch.object(Link, "expect", and_post),
    ):
        return train_under_nccl_rules(arguments, bound)
