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

# A stage that sends message i has proof, from what it received meanwhile, that its neighbor has taken message i - 2
# (see docs/schedules.md), so in steady state waiting for that send costs nothing.
_SENDS_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class Message:
    """What a stage boundary carries: shape [sequence, micro-batch, hidden] and type of one micro-batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Link:
    """One direction between two neighbors: messages in order, at most one receive posted ahead.

    Args:
        source, destination: global ranks, None where the pipeline ends.
        group: process group of this direction alone.
        message: shape and type of every message.
    """

    def __init__(
        self, *, source: int | None, destination: int | None, group: dist.ProcessGroup, message: Message
    ) -> None:
        self._source, self._destination, self._group, self._message = source, destination, group, message
        self._posted: tuple[dist.Work, torch.Tensor] | None = None
        # gloo needs the handle and the tensor alive until the message is out.
        self._sends: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def post_receive(self) -> None:
        """Make room for the next message; nothing at the end of the pipeline."""
        if self._source is None:
            return
        assert self._posted is None, "a receive is posted already"
        message = self._message
        buffer = torch.empty(message.shape, dtype=message.dtype, device=message.device)
        work = dist.irecv(buffer, src=self._source, group=self._group)
        assert work is not None
        self._posted = work, buffer

    def receive(self) -> torch.Tensor | None:
        """The next message, waited for; None at the end of the pipeline."""
        if self._source is None:
            return None
        assert self._posted is not None, "no receive was posted"
        work, buffer = self._posted
        self._posted = None
        _wait(work, f"nothing arrived from rank {self._source}")
        return buffer

    def send(self, tensor: torch.Tensor | None) -> None:
        """Send without waiting; nothing at the end of the pipeline."""
        if self._destination is None:
            return
        assert tensor is not None
        message = tensor.detach().contiguous()
        work = dist.isend(message, dst=self._destination, group=self._group)
        assert work is not None
        self._sends.append((work, message))
        self._complete(_SENDS_IN_FLIGHT)

    def drain(self) -> None:
        """Wait until everything sent has been taken; no receive may be left open."""
        assert self._posted is None, "a posted receive would never be answered"
        self._complete(0)

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
    """Both directions of one stage: activations from the previous stage, gradients from the next."""

    forward: Link
    backward: Link

    def drain(self) -> None:
        self.forward.drain()
        self.backward.drain()


def connect(stage_ranks: list[int], stage: int, message: Message, timeout: timedelta | None = None) -> StageLinks:
    """Link one stage with its neighbors. Collective: every rank of the job must call it.

    Args:
        stage_ranks: global ranks of this pipeline's stages in order.
        stage: index of this rank's stage.
        message: what travels between stages.
        timeout: how long a neighbor may be silent; None for torch's default.
    """
    forward_group = _group_per_pipeline(stage_ranks, timeout)
    backward_group = _group_per_pipeline(stage_ranks, timeout)
    previous = stage_ranks[stage - 1] if stage > 0 else None
    following = stage_ranks[stage + 1] if stage + 1 < len(stage_ranks) else None
    return StageLinks(
        forward=Link(source=previous, destination=following, group=forward_group, message=message),
        backward=Link(source=following, destination=previous, group=backward_group, message=message),
    )


def _group_per_pipeline(stage_ranks: list[int], timeout: timedelta | None) -> dist.ProcessGroup:
    """A new group for each pipeline of the job; return this rank's."""
    pipelines: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(pipelines, stage_ranks)
    distinct = sorted({tuple(ranks) for ranks in pipelines})
    group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in distinct], timeout=timeout)
    assert group is not None
    return group
