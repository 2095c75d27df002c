# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""All hosts of a job that a launcher has started: their clocks, their versions, and the findings of each."""

import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_async.doctor.finding import Finding, unless
from megatron_async.mcore import TESTED
from megatron_async.platform.packages import OPTIONAL

_ALLOWED_SKEW = 0.5
"""Seconds. Logs of the hosts, and the ages in the table of last actions, are compared by their clocks."""
_ALIKE = ("python", "torch", *(package for package, *_ in TESTED), *(package.name for package in OPTIONAL))
"""Checks whose findings must be equal on all hosts."""
_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Host:
    """What one rank of a host found.

    Attributes:
        ranks: of this host.
        offset: seconds by which its clock is ahead of the first host's; uncertain by `uncertainty`.
    """

    name: str
    findings: tuple[Finding, ...]
    ranks: tuple[int, ...] = (0,)
    offset: float = 0.0
    uncertainty: float = 0.0


def gather(own: Sequence[Finding]) -> list[Host]:
    """All hosts, the first rank's first, on every rank. Collective: makes and destroys a gloo group."""
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    try:
        dist.barrier()  # so that the next one is short
        entered = time.time()
        dist.barrier()
        answers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(answers, (socket.gethostname(), tuple(own), entered, time.time()))
        dist.barrier()
    finally:
        dist.destroy_process_group()
    ranks: dict[str, list[int]] = {}
    for rank, (name, *_) in enumerate(answers):
        ranks.setdefault(name, []).append(rank)
    return [_host(tuple(there), answers[there[0]], answers[0]) for there in ranks.values()]


def _host(ranks: tuple[int, ...], answer: Any, first: Any) -> Host:
    """A host by the answer of its first rank and that of rank 0.

    At one moment every rank was inside the barrier, between the two times of its clock.
    """
    name, found, entered, left = answer
    *_, first_entered, first_left = first
    offset = ((entered - first_entered) + (left - first_left)) / 2
    return Host(name, found, ranks, offset, (left - entered + first_left - first_entered) / 2)


def findings(hosts: Sequence[Host]) -> Iterator[Finding]:
    """Findings about the hosts together."""
    yield Finding("hosts", "OK", "; ".join(f"{host.name}: {len(host.ranks)} ranks" for host in hosts))
    for host in hosts[1:]:
        found = f"{host.offset:+.3f} s against {hosts[0].name}, give or take {host.uncertainty:.3f} s"
        certain = abs(host.offset) - host.uncertainty
        change = "synchronize the clocks of the hosts (chrony or NTP)"
        yield unless(certain <= _ALLOWED_SKEW, "WARN", f"clock of {host.name}", found, change)
    if len({len(host.ranks) for host in hosts}) > 1:
        yield Finding("ranks of each host", "WARN", "differ", "give every node the same --nproc-per-node")
    first = {finding.check: finding.found for finding in hosts[0].findings}
    for host in hosts[1:]:
        for finding in host.findings:
            if finding.check in _ALIKE:
                same = finding.found == first.get(finding.check)
                found = finding.found if same else f"{finding.found}; on {hosts[0].name}: {first.get(finding.check)}"
                yield unless(
                    same, "FAIL", f"{finding.check} of {host.name}", found, "install the same version everywhere"
                )
