# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""One device for a whole job: ranks compare what they see before any process group exists."""

import itertools
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist


class MixedDevices(ValueError):
    """Some ranks see a GPU and others do not; raised on every rank."""


def world_size() -> int:
    """Number of processes of the job, from the environment that the launcher sets."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def compare(sees_gpu: bool, timeout: timedelta) -> Any:
    """Raise on every rank if some ranks see a GPU and others do not. Every rank calls this.

    Args:
        sees_gpu: whether this rank has a GPU.
        timeout: how long to wait for the other ranks.

    Returns:
        The store of the rendezvous. While it is kept, `init_process_group` uses the same one.

    Raises:
        MixedDevices: names the ranks without a GPU and their hosts.
    """
    store, rank, ranks = next(iter(dist.rendezvous("env://", timeout=timeout)))
    keys = [f"megatron_async/device/{other}" for other in range(ranks)]
    store.set(keys[rank], f"{int(sees_gpu)} {socket.gethostname()}")
    store.wait(keys, timeout)
    answers = [answer.decode().split(" ", 1) for answer in store.multi_get(keys)]
    # The store lives in rank 0, or in its launcher: rank 0 stays until all have read the answers.
    if store.add("megatron_async/device/read", 1) == ranks:
        store.set("megatron_async/device/done", "")
    if rank == 0:
        store.wait(["megatron_async/device/done"], timeout)
    if len({sees for sees, _ in answers}) > 1:
        raise MixedDevices(_sentence([host if sees == "0" else None for sees, host in answers]))
    return store


def _sentence(without: Sequence[str | None]) -> str:
    """The message, from the host of each rank without a GPU and None for the others."""
    hosts: dict[str, list[int]] = {}
    for rank, host in enumerate(without):
        if host is not None:
            hosts.setdefault(host, []).append(rank)
    count = sum(map(len, hosts.values()))
    named = "; ".join(f"{host}: rank {_ranges(ranks)}" for host, ranks in hosts.items())
    return (
        f"{count} of {len(without)} ranks see no usable GPU ({named}), the others do. Check the driver there, and that "
        "no more processes are started than there are GPUs; or give --device cpu to all."
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Increasing numbers with runs of neighbors as ranges: 0-3, 6."""
    runs = [[number for _, number in run] for _, run in itertools.groupby(enumerate(numbers), lambda at: at[1] - at[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
