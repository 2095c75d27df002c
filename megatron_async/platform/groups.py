# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Process groups of one purpose each, with their communicators made in one global order when a run is built.

NCCL makes a communicator at its first operation, where all of its ranks meet and their hosts wait. A communicator is
one queue: a receive that waits for its message holds up everything behind it. So every directed edge of the pipeline,
and every collective whose start depends on the progress of a rank, has a group of its own.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_async.mcore.parallel import device, timeout


@dataclass(frozen=True, order=True, slots=True)
class GroupKey:
    """A group by its purpose.

    Attributes:
        purpose: tells groups of the same ranks apart.
        ranks: global ranks; of an edge the source, then the destination.
        edge: whether messages go from the first rank to the second, and nothing else.
    """

    purpose: str
    ranks: tuple[int, ...]
    edge: bool = False


def make_groups(keys: Sequence[GroupKey]) -> list[dist.ProcessGroup]:
    """New groups, with their communicators. Collective over all ranks of the job.

    Args:
        keys: groups that this rank belongs to; other ranks may give others.
    """
    lists: list[list[GroupKey]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(lists, list(keys))
    every = sorted({key for those in lists for key in those})
    # A rank outside a group only counts it, so that all ranks give groups the same names.
    groups = {key: dist.new_group(list(key.ranks), timeout=timeout(), pg_options=_options()) for key in every}
    for key in every:
        if dist.get_rank() in key.ranks:
            make_communicator(groups[key], key.ranks if key.edge else None)
    return [groups[key] for key in keys]


def _options() -> Any:
    """NCCL's kernels start before those of the compute, where both could: a message or a norm is waited for."""
    if dist.get_backend() != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout()
    return options


def group_of_all(purpose: str) -> dist.ProcessGroup | None:
    """A new group of all ranks of the job; None for one process. Collective."""
    ranks = tuple(range(dist.get_world_size()))
    return make_groups([GroupKey(purpose, ranks)])[0] if len(ranks) > 1 else None


def make_communicator(group: dist.ProcessGroup, edge: tuple[int, ...] | None = None) -> None:
    """Run the first operation of a group. Collective over its ranks.

    Args:
        edge: source and destination of a group for messages; None for a group for collectives. NCCL keeps separate
            communicators for the two.
    """
    value = torch.zeros(1, device=device())
    if edge is None:
        dist.all_reduce(value, group=group)
    elif dist.get_rank() == edge[0]:
        dist.send(value, edge[1], group=group)
    else:
        dist.recv(value, edge[0], group=group)


def make_communicators(groups: Iterable[dist.ProcessGroup | None]) -> None:
    """`make_communicator` for groups for collectives, in this order. Collective.

    Every rank must give groups of the same kinds in the same order, and the groups of one kind must not overlap: then
    no two ranks wait for each other. A rank outside a kind gives None.
    """
    for group in groups:
        if group is not None and group.size() > 1:
            make_communicator(group)
