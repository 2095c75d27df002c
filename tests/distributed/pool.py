# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Processes that import torch and Megatron once and then run one distributed job after another over gloo.

A job is a function, by module and name, called on every rank. A job that hangs or fails gives every rank's log; the
pool starts new processes afterwards.
"""

import gc
import importlib
import itertools
import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# Some models are held by cycles through autograd's own nodes, which Python cannot collect; the threads of their process
# groups live as long and slow everything down. A worker with more threads than this is replaced after its job.
_MOST_THREADS = 250
_TAIL = 4000


class JobFailed(AssertionError):
    """A rank failed, ended or did not answer in time; the message holds the end of every rank's log."""


@dataclass(slots=True)
class _Worker:
    process: Any
    pipe: Connection
    log: Path


class Pool:
    """Up to four worker processes, started when first needed."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="workers-")
        self._workers: list[_Worker] = []
        self._numbers = itertools.count()

    def run(self, job: str, *args: Any, ranks: int, timeout: float = 120.0) -> list[Any]:
        """Run `module:function` with `args` on ranks 0 .. ranks-1; return what each rank returned, by rank."""
        while len(self._workers) < ranks:
            self._workers.append(self._start(next(self._numbers)))
        workers = self._workers[:ranks]
        port = _free_port()
        for rank, worker in enumerate(workers):
            worker.log.write_text("")
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            worker.pipe.send((job, args, environment))
        answers = self._collect(workers, timeout)
        failed = [rank for rank, answer in enumerate(answers) if answer is None or not answer[0]]
        if failed:
            logs = "\n".join(self._report(rank, answers[rank], workers[rank]) for rank in range(ranks))
            self.close()
            raise JobFailed(f"{job} failed on ranks {failed}\n{logs}")
        self._replace_crowded(workers)
        return [answer[1] for answer in answers if answer is not None]

    def _replace_crowded(self, workers: Sequence[_Worker]) -> None:
        for worker in workers:
            if len(os.listdir(f"/proc/{worker.process.pid}/task")) > _MOST_THREADS:
                worker.process.kill()
                worker.process.join()
                self._workers.remove(worker)

    def close(self) -> None:
        for worker in self._workers:
            worker.process.kill()
            worker.process.join()
        self._workers.clear()

    def _collect(self, workers: Sequence[_Worker], timeout: float) -> list[tuple[bool, Any] | None]:
        answers: list[tuple[bool, Any] | None] = [None] * len(workers)
        deadline = time.monotonic() + timeout
        open_pipes = {worker.pipe: rank for rank, worker in enumerate(workers)}
        while open_pipes and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(open_pipes), timeout=left):
                rank = open_pipes.pop(pipe)  # type: ignore[index]
                try:
                    answers[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    answers[rank] = False, "the process ended"
            if any(answer is not None and not answer[0] for answer in answers):
                deadline = min(deadline, time.monotonic() + 5.0)  # the others will only wait for the failed rank
        return answers

    @staticmethod
    def _report(rank: int, answer: tuple[bool, Any] | None, worker: _Worker) -> str:
        state = "no answer in time" if answer is None else "done" if answer[0] else f"failed:\n{answer[1]}"
        return f"--- rank {rank}: {state}\n{worker.log.read_text(errors='replace')[-_TAIL:]}"

    def _start(self, number: int) -> _Worker:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        log = Path(self._folder.name) / f"worker{number}.log"
        process = context.Process(target=_serve, args=(theirs, str(log)), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, ours, log)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve(pipe: Connection, log: str) -> None:
    """Body of a worker: redirect output to the log, then answer jobs until the pipe closes."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    from megatron_async import platform

    platform.activate("cpu")
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    # Megatron makes up 100,000 documents, which are 13 million of our short sequences, and shuffles them for every run.
    MockGPTLowLevelDataset.size = 1000
    while True:
        try:
            job, args, environment = pipe.recv()
        except EOFError:
            return
        os.environ.update(environment)
        module, _, name = job.partition(":")
        try:
            answer = True, getattr(importlib.import_module(module), name)(*args)
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send(answer)
        # A run's objects are cycles, and hold its process groups, each with threads of its own. Left to themselves they
        # would live for many jobs.
        del answer
        gc.collect()
