# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""All hosts of a job that a launcher has started: their clocks, their versions, and the findings of each."""

import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_async.doctor.finding import Finding, unless
from megatron_async.mcore import TESTED
from megatron_async.platform.packages import OPTIONAL

_ROUNDS = 5
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
        offset, uncertainty = _offset_from_first()
        answers: list[Host | None] = [None] * dist.get_world_size()
        own_host = Host(socket.gethostname(), tuple(own), (dist.get_rank(),), offset, uncertainty)
        dist.all_gather_object(answers, own_host)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    hosts: dict[str, list[Host]] = {}
    for answer in answers:
        assert answer is not None
        hosts.setdefault(answer.name, []).append(answer)
    return [
        Host(name, parts[0].findings, tuple(part.ranks[0] for part in parts), parts[0].offset, parts[0].uncertainty)
        for name, parts in hosts.items()
    ]


def _offset_from_first() -> tuple[float, float]:
    """Seconds by which this rank's clock is ahead of rank 0's, and the uncertainty: half of the shortest round trip.

    Rank 0 answers one rank after another with its time, which is taken as that of the middle of the round trip.
    """
    rank, shortest, offset = dist.get_rank(), float("inf"), 0.0
    if rank == 0:
        for other in range(1, dist.get_world_size()):
            for _ in range(_ROUNDS):
                dist.recv(torch.empty(1), src=other)
                dist.send(_packed(time.time()), dst=other)
        return 0.0, 0.0
    answer = _packed(0.0)
    for _ in range(_ROUNDS):
        asked = time.time()
        dist.send(torch.empty(1), dst=0)
        dist.recv(answer, src=0)
        answered = time.time()
        if answered - asked < shortest:
            shortest, offset = answered - asked, (asked + answered) / 2 - _unpacked(answer)
    return offset, shortest / 2


def _packed(seconds: float) -> torch.Tensor:
    return torch.frombuffer(bytearray(struct.pack("d", seconds)), dtype=torch.uint8)


def _unpacked(values: torch.Tensor) -> float:
    return float(struct.unpack("d", values.numpy().tobytes())[0])


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
