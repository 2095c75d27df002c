# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Point-to-point traffic of one stage with its neighbors, over one process group for each directed edge.

Compiling a kernel synchronizes the device, which then waits for all that was launched: posted receives, which must not
depend on that very kernel, and sends, which must be taken without it. So a receive is posted before the compute that
precedes its use, but the first one of a segment at its use, and in the first segment of a process all of them.
Messages that come round a ring of stages wait for long: the schedule says when their receives are due
(`schedules/wpipe.py`).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_async.platform.groups import GroupKey, make_groups


@dataclass(frozen=True, slots=True)
class Message:
    """What a stage boundary carries: shape [sequence, micro-batch, hidden] and type of one micro-batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class Edge:
    """One direction between two stages: the neighbor's global rank and the edge's group."""

    neighbor: int
    group: dist.ProcessGroup


class Link:
    """Messages of one kind through a stage: in over one edge, out over another, in order.

    Args:
        source, destination: edges; None at an end of the model.
        ring: whether the messages in come round a ring, from the other end of the stages.
        message: shape and type of every message.
        sends_in_flight: so many sends are not waited for. The schedule must give proof that earlier ones have been
            taken by then (see docs/schedules.md), so that waiting for them costs nothing.
    """

    def __init__(
        self,
        *,
        source: Edge | None,
        destination: Edge | None,
        message: Message,
        sends_in_flight: int,
        ring: bool = False,
    ) -> None:
        self._source, self._destination, self._message = source, destination, message
        self._sends_in_flight, self._ring = sends_in_flight, ring
        self._expected = self._received = 0
        self._posted: deque[tuple[dist.Work, torch.Tensor]] = deque()
        # gloo needs the handle and the tensor alive until the message is out.
        self._sends: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self.post_ahead = True
        """Whether the next receive is posted as soon as one is done, or at its use."""

    def expect(self, messages: int) -> None:
        """Expect so many more messages; fewer, where negative, but not fewer than have been posted for."""
        self._expected += messages
        assert self._expected >= 0

    def receive(self) -> torch.Tensor:
        """Wait for the next message."""
        if not self._posted:
            self._post()
        assert self._posted and self._source is not None, "no message is expected"
        work, buffer = self._posted.popleft()
        self._received += 1
        _wait(work, f"nothing arrived from rank {self._source.neighbor}")
        if self.post_ahead and not self._ring:
            self._post()
        return buffer

    def post_due(self, receives: int) -> None:
        """Post receives of messages that come round, up to this number since the pipe was empty."""
        if self._ring:
            for _ in range(receives - self._received - len(self._posted)):
                self._post()

    def send(self, tensor: torch.Tensor) -> None:
        """Send without waiting."""
        assert self._destination is not None
        message = tensor.detach().contiguous()
        work = dist.isend(message, dst=self._destination.neighbor, group=self._destination.group)
        assert work is not None
        self._sends.append((work, message))
        self._complete(self._sends_in_flight)

    def drain(self) -> None:
        """Wait until everything sent has been taken; nothing may be expected any more."""
        assert not self._posted and self._expected == 0, "a message that never came"
        self._received = 0
        self._complete(0)

    def _post(self) -> None:
        if self._expected == 0:
            return
        assert self._source is not None
        self._expected -= 1
        message = self._message
        buffer = torch.empty(message.shape, dtype=message.dtype, device=message.device)
        work = dist.irecv(buffer, src=self._source.neighbor, group=self._source.group)
        assert work is not None
        self._posted.append((work, buffer))

    def _complete(self, allowed: int) -> None:
        while len(self._sends) > allowed:
            assert self._destination is not None
            work, _ = self._sends.popleft()
            _wait(work, f"rank {self._destination.neighbor} did not take what was sent")


class LinkFailure(RuntimeError):
    """A neighbor is gone or stuck; the message names it."""


def _wait(work: dist.Work, otherwise: str) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise LinkFailure(f"{otherwise}: {str(error).splitlines()[0]}") from error


@dataclass(frozen=True, slots=True)
class StageLinks:
    """Both directions of one rank: activations towards the end of the model, gradients towards its beginning."""

    forward: Link
    backward: Link

    def drain(self) -> None:
        self.forward.drain()
        self.backward.drain()

    def post_ahead(self, ahead: bool) -> None:
        """Post receives ahead of their use, or not; between segments."""
        self.forward.post_ahead = self.backward.post_ahead = ahead

    def post_due(self, receives: int) -> None:
        """Post what is due of messages that come round (`Compute.due`)."""
        self.forward.post_due(receives)
        self.backward.post_due(receives)


def connect(
    stage_ranks: Sequence[int],
    stage: int,
    message: Message,
    sends_in_flight: int,
    *,
    ring: bool = False,
) -> StageLinks:
    """Link one stage with its neighbors. Collective over all ranks of the job.

    Args:
        stage_ranks: global ranks of this pipeline's stages in order.
        stage: index of this rank's stage.
        message: shape and type of every message between stages.
        sends_in_flight: see `Link`.
        ring: whether the last stage sends on to the first one, as virtual stages do.
    """
    stages = len(stage_ranks)

    def rank_of(index: int) -> int | None:
        if ring:
            index %= stages
        return stage_ranks[index] if 0 <= index < stages else None

    own, before, after = stage_ranks[stage], rank_of(stage - 1), rank_of(stage + 1)
    pairs = [
        ("activations", before, own),
        ("activations", own, after),
        ("gradients", after, own),
        ("gradients", own, before),
    ]
    keys = [
        None if source is None or destination is None else GroupKey(kind, (source, destination), edge=True)
        for kind, source, destination in pairs
    ]
    groups = iter(make_groups([key for key in keys if key is not None]))
    edges = [
        None if key is None else Edge(key.ranks[1] if key.ranks[0] == own else key.ranks[0], next(groups))
        for key in keys
    ]
    common: dict[str, Any] = {"message": message, "sends_in_flight": sends_in_flight}
    return StageLinks(
        Link(source=edges[0], destination=edges[1], ring=ring and stage == 0, **common),
        Link(source=edges[2], destination=edges[3], ring=ring and stage == stages - 1, **common),
    )
