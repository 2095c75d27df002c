# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Point-to-point traffic of one stage with its neighbors.

Receives are posted before the compute that precedes their use. Activations and gradients travel in separate process
groups: within one NCCL communicator a pending receive in one direction would block a send queued behind it.
"""

from collections import deque
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_async.pipeline.groups import own_groups


@dataclass(frozen=True, slots=True)
class Message:
    """What a stage boundary carries: shape [sequence, micro-batch, hidden] and type of one micro-batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Link:
    """One direction between two neighbors: messages in order, at most one receive posted ahead.

    Args:
        source, destination: global ranks of the neighbors in this direction; the pipeline's ends are neighbors too
            (virtual stages go around), but send nothing to each other where there is only one chunk for each rank.
        group: process group of this direction alone.
        message: shape and type of every message.
        sends_in_flight: so many sends are not waited for. The schedule must give proof that earlier ones have been
            taken by then (see docs/schedules.md), so that waiting for them costs nothing.
    """

    def __init__(
        self, *, source: int, destination: int, group: dist.ProcessGroup, message: Message, sends_in_flight: int
    ) -> None:
        self._source, self._destination, self._group, self._message = source, destination, group, message
        self._sends_in_flight = sends_in_flight
        self._expected = 0
        self._posted: tuple[dist.Work, torch.Tensor] | None = None
        # gloo needs the handle and the tensor alive until the message is out.
        self._sends: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def expect(self, messages: int) -> None:
        """So many more messages will come; fewer, where negative, but not fewer than have been posted for."""
        self._expected += messages
        assert self._expected >= 0
        self._post()

    def receive(self) -> torch.Tensor:
        """The next message, waited for; the one after it is made room for."""
        assert self._posted is not None, "no message is expected"
        work, buffer = self._posted
        self._posted = None
        _wait(work, f"nothing arrived from rank {self._source}")
        self._post()
        return buffer

    def send(self, tensor: torch.Tensor) -> None:
        """Send without waiting."""
        message = tensor.detach().contiguous()
        work = dist.isend(message, dst=self._destination, group=self._group)
        assert work is not None
        self._sends.append((work, message))
        self._complete(self._sends_in_flight)

    def drain(self) -> None:
        """Wait until everything sent has been taken; nothing may be expected any more."""
        assert self._posted is None and self._expected == 0, "a message that never came"
        self._complete(0)

    def _post(self) -> None:
        if self._expected == 0 or self._posted is not None:
            return
        self._expected -= 1
        message = self._message
        buffer = torch.empty(message.shape, dtype=message.dtype, device=message.device)
        work = dist.irecv(buffer, src=self._source, group=self._group)
        assert work is not None
        self._posted = work, buffer

    def _complete(self, allowed: int) -> None:
        while len(self._sends) > allowed:
            work, _ = self._sends.popleft()
            _wait(work, f"rank {self._destination} did not take what was sent")


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


def connect(
    stage_ranks: list[int], stage: int, message: Message, sends_in_flight: int, timeout: timedelta | None = None
) -> StageLinks:
    """Link one stage with its neighbors. Collective: every rank of the job must call it.

    Args:
        stage_ranks: global ranks of this pipeline's stages in order.
        stage: index of this rank's stage.
        message: what travels between stages.
        sends_in_flight: see `Link`.
        timeout: how long a neighbor may be silent; None for torch's default.
    """
    previous = stage_ranks[stage - 1]
    following = stage_ranks[(stage + 1) % len(stage_ranks)]

    def link(source: int, destination: int) -> Link:
        return Link(
            source=source,
            destination=destination,
            group=own_groups([stage_ranks], timeout)[0],
            message=message,
            sends_in_flight=sends_in_flight,
        )

    return StageLinks(forward=link(previous, following), backward=link(following, previous))
