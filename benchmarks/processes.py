# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Ranks as processes on this machine. They import torch and Megatron once and run one job after another over gloo.

A job is a function, named "module:function", that every rank calls with the same arguments.
"""

import contextlib
import gc
import importlib
import itertools
import multiprocessing
import os
import random
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
_RANDOM = random.SystemRandom()  # jobs seed the others
# Cycles through autograd's own nodes keep some models alive, and with them the threads of their process groups. A
# worker with more threads than this is replaced after its job.
_MOST_THREADS = 250
_TAIL = 4000  # characters of a log in a message

DEVICE = "MEGATRON_ASYNC_BENCHMARK_DEVICE"
"""Variable that holds the device of all workers, cpu unless it is set."""


class JobFailed(RuntimeError):
    """A rank failed, ended or did not answer in time; the message holds the end of every rank's log."""


@cache
def context() -> Any:
    """A multiprocessing context that forks from a server with torch and Megatron imported and one thread.

    On GPUs each worker starts from nothing: a process that has looked for GPUs must not be forked.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    # The server imports `benchmarks.preload` with its own sys.path, and goes on without it where that fails.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    if os.environ.get(DEVICE) == "cuda":
        return multiprocessing.get_context("spawn")
    forkserver = multiprocessing.get_context("forkserver")
    forkserver.set_forkserver_preload(["benchmarks.preload"])
    return forkserver


def environments(ranks: int) -> list[dict[str, str]]:
    """What torch.distributed reads, for each rank of a job.

    The port is new: on that of an earlier job, ranks could find the addresses of that job.
    """
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(ranks)}
    return [meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _free_port() -> int:
    """Below those that Linux gives to connections: one of these could take it before the job listens there."""
    while True:
        port = _RANDOM.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def redirect_output(log: Path) -> None:
    """Append everything that this process prints to a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


@dataclass(slots=True)
class _Worker:
    process: Any
    pipe: Connection
    log: Path

    def end(self) -> None:
        self.process.kill()
        self.process.join()


class Pool(AbstractContextManager["Pool"]):
    """Worker processes, started when first needed. Leaving the `with` block ends them.

    Args:
        setup: job that each worker runs once, before its first one.
        pinned: whether to bind worker n to core n, modulo the number of cores.
        libraries: folder whose packages come before the installed ones. Its workers start from nothing.
    """

    def __init__(self, setup: str = "", *, pinned: bool = False, libraries: Path | None = None) -> None:
        self._setup, self._pinned, self._libraries = setup, pinned, libraries
        self._folder = tempfile.TemporaryDirectory(prefix="workers-")
        self._workers: list[_Worker] = []
        self._numbers = itertools.count()

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, job: str, *args: Any, ranks: int, timeout: float = 120.0) -> list[Any]:
        """Call `module:function` with `args` on ranks 0 .. ranks-1; return the results by rank.

        Args:
            timeout: seconds.

        Raises:
            JobFailed: on the first failure of any rank. The next job starts new processes.
        """
        while len(self._workers) < ranks:
            self._workers.append(self._start(next(self._numbers)))
        workers = self._workers[:ranks]
        for worker, environment in zip(workers, environments(ranks), strict=True):
            worker.log.write_text("")
            worker.pipe.send((job, args, environment))
        answers = self._collect(workers, timeout)
        if failed := [rank for rank, (succeeded, _) in enumerate(answers) if not succeeded]:
            logs = "\n".join(
                f"--- rank {rank}: {'done' if succeeded else value}\n{worker.log.read_text(errors='replace')[-_TAIL:]}"
                for rank, (worker, (succeeded, value)) in enumerate(zip(workers, answers, strict=True))
            )
            self.close()
            raise JobFailed(f"{job} failed on ranks {failed}\n{logs}")
        for worker in workers:
            if len(os.listdir(f"/proc/{worker.process.pid}/task")) > _MOST_THREADS:
                worker.end()
                self._workers.remove(worker)
        return [value for _, value in answers]

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.end()
        self._workers.clear()

    @staticmethod
    def _collect(workers: Sequence[_Worker], timeout: float) -> list[tuple[bool, Any]]:
        """Whether each rank succeeded, and its result or the reason why not."""
        answers: list[tuple[bool, Any]] = [(False, "no answer in time")] * len(workers)
        deadline = time.monotonic() + timeout
        waiting: dict[Any, int] = {worker.pipe: rank for rank, worker in enumerate(workers)}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), timeout=left):
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = workers[rank].pipe.recv()
                except (EOFError, ConnectionResetError):
                    answers[rank] = False, "failed: the process ended"
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + 5.0)  # the others will only wait for the failed rank
        return answers

    def _start(self, number: int) -> _Worker:
        start = context() if self._libraries is None else multiprocessing.get_context("spawn")
        ours, theirs = start.Pipe()
        log, cores = Path(self._folder.name) / f"worker{number}.log", sorted(os.sched_getaffinity(0))
        core = cores[number % len(cores)] if self._pinned else None
        process = start.Process(target=_serve, args=(theirs, log, core, self._setup, self._libraries), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, ours, log)


def _call(job: str, args: Sequence[Any]) -> Any:
    module, _, name = job.partition(":")
    return getattr(importlib.import_module(module), name)(*args)


def _serve(pipe: Connection, log: Path, core: int | None, setup: str, libraries: Path | None) -> None:
    """Body of a worker: answer jobs until the pipe closes."""
    redirect_output(log)
    if libraries is not None:
        sys.path.insert(0, str(libraries))
    if core is not None:
        os.sched_setaffinity(0, {core})
    importlib.import_module("benchmarks.preload")  # done already, unless the server could not import it
    while True:
        try:
            job, args, variables = pipe.recv()
        except EOFError:
            return
        os.environ.update(variables)
        try:
            if setup:
                _call(setup, ())
                setup = ""
            answer = True, _call(job, args)
        except BaseException:
            answer = False, f"failed:\n{traceback.format_exc()}"
        pipe.send(answer)
        # The objects of a run form cycles and hold process groups with threads of their own. Uncollected, they would
        # live on for many jobs.
        del answer
        gc.collect()
