# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Ranks as processes that share one start-up: Megatron is imported once, then every rank is forked from there."""

import contextlib
import importlib
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

PRELOAD = "benchmarks.preload"
_PORTS = "BENCHMARK_PORTS"
_JOBS = 128
"""Most jobs that the same processes run one after the other."""


class RanksFailed(RuntimeError):
    """A rank failed or did not answer in time; the message has the traceback."""


def run(function: str, *args: Any, ranks: int, timeout: float) -> list[Any]:
    """Call `module:function` with `args` on every rank of a new job; return the results by rank.

    Ranks are pinned to cores in turn and have one compute thread each.

    Raises:
        RanksFailed: naming the rank.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOAD])
    os.environ["OMP_NUM_THREADS"] = "1"
    ports = _free_ports()
    pipes, processes = [], []
    for rank in range(ranks):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(theirs, function, args, rank, ranks, ports), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return _collect(function, pipes, timeout)
    finally:
        for process in processes:
            process.join(timeout=2)
            if process.is_alive():
                process.kill()
                process.join()


def _collect(function: str, pipes: list[Any], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while len(results) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RanksFailed(f"{function}: ranks {sorted(waiting.values())} did not answer within {timeout:.0f} s")
        for pipe in ready:
            rank = waiting[pipe]  # type: ignore[index]
            try:
                succeeded, value = pipe.recv()  # type: ignore[union-attr, call-arg]
            except EOFError:
                succeeded, value = False, "the process ended"
            if not succeeded:
                raise RanksFailed(f"{function}: rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _serve(pipe: Any, function: str, args: tuple[Any, ...], rank: int, ranks: int, ports: list[int]) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        _PORTS: " ".join(map(str, ports)),
    }
    new_meeting_point()
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)  # Megatron's start-up messages, from every rank of every cell
    os.dup2(silent, 2)
    try:
        module, _, name = function.partition(":")
        target: Callable[..., Any] = getattr(importlib.import_module(module), name)
        answer = True, target(*args)
    except BaseException:
        answer = False, traceback.format_exc()
    pipe.send(answer)
    sys.stdout.flush()
    os._exit(0)  # process groups end with their processes; taking them down one by one takes seconds


def new_meeting_point() -> None:
    """Let this process's next job meet at a port of its own; every rank must call it as often.

    On the port of an earlier job a rank could still find that job's addresses.
    """
    port, *others = os.environ[_PORTS].split()
    os.environ |= {"MASTER_PORT": port, _PORTS: " ".join(others)}


def _free_ports() -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(_JOBS)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
