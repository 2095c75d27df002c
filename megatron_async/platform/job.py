# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""One job on all hosts: ranks compare device, arguments, versions and code before any process group exists."""

import itertools
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any


class Differences(ValueError):
    """Ranks differ in what must be equal; raised on every rank. `problems` has one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(problems))


@dataclass(frozen=True, slots=True)
class Rank:
    """What a rank says about itself.

    Attributes:
        gpu: whether it has a usable GPU; None if it does not matter.
        versions: of the packages and of this package's code.
        arguments: of its command line.
    """

    gpu: bool | None
    versions: Mapping[str, str]
    arguments: Sequence[str]
    host: str = field(default_factory=socket.gethostname)


def world_size() -> int:
    """Number of processes of the job, from the environment that the launcher sets."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def compare(own: Rank, timeout: timedelta) -> Any:
    """Raise on every rank if ranks differ. Every rank calls this. Rank 0 reads what all say, the others its verdict.

    Args:
        own: this rank.
        timeout: how long to wait for the other ranks.

    Returns:
        The store of the rendezvous. While it is kept, `init_process_group` uses the same one.

    Raises:
        Differences: names ranks, hosts and values.
        TimeoutError: names the ranks that did not start in time.
    """
    import torch.distributed as dist  # takes a second, which one process need not wait

    store, rank, ranks = next(iter(dist.rendezvous("env://", timeout=timeout)))
    prefix = "megatron_async/job/"
    keys = [f"{prefix}{other}" for other in range(ranks)]
    store.set(keys[rank], json.dumps(asdict(own)))
    if rank == 0:
        verdict = _verdict(store, keys, timeout)
        store.set(f"{prefix}verdict", json.dumps(verdict))
    else:
        store.wait([f"{prefix}verdict"], 2 * timeout)
        verdict = json.loads(store.get(f"{prefix}verdict"))
    # The store lives in rank 0, or in its launcher: rank 0 stays until all have read the verdict.
    if store.add(f"{prefix}read", 1) == ranks - len(verdict["missing"]):
        store.set(f"{prefix}done", "")
    if rank == 0:
        store.wait([f"{prefix}done"], timeout)
    if missing := verdict["missing"]:
        raise TimeoutError(
            f"rank {ranges(missing)} of {ranks} did not start within {timeout.total_seconds() / 60:g} min"
        )
    if verdict["problems"]:
        raise Differences(verdict["problems"])
    return store


def _verdict(store: Any, keys: Sequence[str], timeout: timedelta) -> dict[str, list[Any]]:
    try:
        store.wait(list(keys), timeout)
    except RuntimeError:
        if missing := [rank for rank, key in enumerate(keys) if not store.check([key])]:
            return {"missing": missing, "problems": []}
    answers = [Rank(**json.loads(answer)) for answer in store.multi_get(list(keys))]
    return {"missing": [], "problems": list(differences(answers))}


def differences(ranks: Sequence[Rank]) -> Iterator[str]:
    """What differs between ranks, one sentence for each kind; the first rank is the measure."""
    without = [rank for rank, said in enumerate(ranks) if said.gpu is False]
    if 0 < len(without) < len(ranks):
        yield (
            f"{len(without)} of {len(ranks)} ranks see no usable GPU ({_named(without, ranks)}), the others do. Check "
            "the driver there, and that no more processes are started than there are GPUs; or give --device cpu to all."
        )
    for name in ranks[0].versions:
        values = [said.versions.get(name, "none") for said in ranks]
        yield from _unequal(name, values, ranks, "Install the same everywhere.")
    given = [options(said.arguments) for said in ranks]
    for flag in dict.fromkeys(itertools.chain.from_iterable(given)):
        values = [flags.get(flag, "not given") for flags in given]
        yield from _unequal(flag, values, ranks, "Start all hosts with the same arguments.")


def _unequal(name: str, values: Sequence[str], ranks: Sequence[Rank], change: str) -> Iterator[str]:
    for value in dict.fromkeys(values):
        if value != values[0]:
            there = [rank for rank, other in enumerate(values) if other == value]
            yield f"{name} is {value} on {_named(there, ranks)}, but {values[0]} on {ranks[0].host}: rank 0. {change}"


def options(arguments: Sequence[str]) -> dict[str, str]:
    """Flags of a command line with their values as text; `--a=b` is `--a b`."""
    found: dict[str, str] = {}
    flag = ""
    for word in arguments:
        if word.startswith("--"):
            flag, _, value = word.partition("=")
            found[flag] = value
        else:
            found[flag] = f"{found.get(flag, '')} {word}".strip()
    return {flag: value or "given" for flag, value in found.items()}


def _named(numbers: Sequence[int], ranks: Sequence[Rank]) -> str:
    """Ranks by their hosts: `a: rank 0-3; b: rank 5`."""
    hosts: dict[str, list[int]] = {}
    for rank in numbers:
        hosts.setdefault(ranks[rank].host, []).append(rank)
    return "; ".join(f"{host}: rank {ranges(there)}" for host, there in hosts.items())


def ranges(numbers: Sequence[int]) -> str:
    """Increasing numbers with runs of neighbors as ranges: 0-3, 6."""
    runs = [[number for _, number in run] for _, run in itertools.groupby(enumerate(numbers), lambda at: at[1] - at[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
