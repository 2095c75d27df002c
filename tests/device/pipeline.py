# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A pipeline of the real `Executor`, `Link`, `DeferredUpdate` and `UpdateCollectives` on simulated devices.

Models, optimizers and data are replaced by bursts of kernels with the times of a stage.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.device.costs import Machine, StageTimes
from benchmarks.device.engine import Operation, Simulation
from megatron_async.pipeline import collectives, executor, links, update
from megatron_async.pipeline.accumulators import Accumulators
from megatron_async.pipeline.decision import UpdateRule
from megatron_async.pipeline.router_bias import RouterBiases
from megatron_async.pipeline.update import Launch
from megatron_async.pipeline.weights import WeightVersions
from megatron_async.platform import host
from megatron_async.schedules import SCHEDULES
from tests.device.machine import Event, Group, HostValues, Rank, Streams, rank_here, start

_NORM_LAUNCHES = 10
_INTERVAL = 1.0
"""ms between two looks of a host that waits; shorter ones take long to simulate."""


@dataclass
class Run:
    """A simulated run.

    Attributes:
        schedule: name.
        microbatches: of a batch.
        times: of each rank, replica by replica.
        segments: numbers of batches; the pipe drains after each.
        at_use: segments at the start whose receives are posted at their use.
        python: host time of each action besides its launches, in ms.
        synchronize: ranks and numbers, from 0, of their forwards and backwards in which they synchronize their devices.
        spans: for each rank, its forwards and backwards.
        hung: ranks whose host waits forever.
    """

    schedule: str
    stages: int
    microbatches: int
    launch: Launch
    times: Sequence[StageTimes]
    machine: Machine
    segments: Sequence[int] = (6,)
    at_use: int = 0
    python: float = 0.0
    synchronize: frozenset[tuple[int, int]] = frozenset()
    spans: list[list[Operation]] = field(default_factory=list)
    hung: list[int] = field(default_factory=list)

    @property
    def replicas(self) -> int:
        return len(self.times) // self.stages

    def go(self) -> "Run":
        """Simulate. Errors of ranks are raised."""
        simulation = Simulation()
        self.spans = [[] for _ in self.times]
        with _simulated():
            ranks = [Rank(simulation, self.machine, number, self._train) for number in range(len(self.times))]
            simulation.run()
        for rank in ranks:
            if rank.error is not None:
                raise rank.error
        self.hung = [rank.number for rank in ranks if not rank.host.finished]
        return self

    @property
    def ratio(self) -> float:
        """Time of a batch in steady state, of the slowest rank, relative to compute alone."""
        batches, size = sum(self.segments), self.microbatches * SCHEDULES[self.schedule].chunks
        forwards = [[own for own in row if own.category == "F"] for row in self.spans]
        taken = [(row[(batches - 1) * size].start - row[3 * size].start) / (batches - 4) for row in forwards]
        alone = [self.microbatches * (own.forward + own.backward) + own.step for own in self.times]
        return max(taken) / max(alone)

    def _train(self) -> None:
        _Stage(self).train()


class _Stage:
    """One rank of a run, made and used in its thread."""

    def __init__(self, run: Run) -> None:
        self._run, self._rank = run, rank_here()
        self._rank.stage = self
        self._times, self._definition = run.times[self._rank.number], SCHEDULES[run.schedule]
        replica, self._stage = divmod(self._rank.number, run.stages)
        self._links = links.connect(
            range(replica * run.stages, (replica + 1) * run.stages),
            self._stage,
            links.Message((1,), torch.float32, torch.device("cpu")),
            sends_in_flight=self._definition.untaken_sends(run.stages),
            ring=self._definition.chunks > 1,
        )
        delays = self._definition.delays(run.stages, self._stage)
        nothing = SimpleNamespace(span=lambda *_, **__: contextlib.nullcontext())
        hooks = dict.fromkeys(("losses", "updated", "acted"), lambda *_: None)
        self._chunks = [self._chunk(index, delay) for index, delay in enumerate(delays)]
        self._executor = executor.Executor(
            chunks=self._chunks,
            step=executor.MicrobatchStep(lambda: None, run.microbatches, 1),
            links=self._links,
            hooks=executor.Hooks(**hooks, action=lambda *_: self._rank.work(run.python), shared=lambda *_: ()),  # type: ignore[arg-type]
            timeline=nothing,  # type: ignore[arg-type]
            pace=None if run.launch is Launch.AT_ONCE else host.Pace(),
        )

    def train(self) -> None:
        run, first = self._run, 0
        for number, batches in enumerate(run.segments):
            self._links.post_ahead(number >= run.at_use and self._definition.posts_ahead(run.stages))
            for chunk in self._chunks:
                chunk.update.all_at_update = number < run.at_use
            self._executor.run(lambda count, begin=first: self._plan(count, begin), first_batch=first, batches=batches)
            first += batches

    def _plan(self, batches: int, first: int) -> Iterator[Any]:
        return self._definition.plan(
            stages=self._run.stages,
            stage=self._stage,
            microbatches=self._run.microbatches,
            batches=batches,
            first_batch=first,
        )

    def compute(self, kind: str) -> None:
        """A forward or backward of a micro-batch, of one chunk."""
        run, own = self._run, self._run.spans[self._rank.number]
        if (self._rank.number, len(own)) in run.synchronize:
            self._rank.synchronize()
        time = self._times.forward if kind == "F" else self._times.backward
        chunks, whole = self._definition.chunks, self._times.forward + self._times.backward
        own.append(self._rank.burst(kind, time / chunks, round(run.machine.launches * time / whole / chunks)))

    def step(self, _: Any) -> None:
        chunks = self._definition.chunks
        self._rank.burst("step", self._times.step / chunks, self._run.machine.step_launches // chunks)

    def _chunk(self, index: int, delay: int) -> executor.Chunk:
        run, definition = self._run, self._definition
        alone = definition.norm_scope == "stage"
        norm = Group(
            f"norm {index}{f' of stage {self._stage}' if alone else ''}",
            run.replicas * (1 if alone else run.stages),
            "norm",
            run.machine.norm,
        )
        self.groups_of_update = [norm, Group(f"everyone {index}", len(run.times), "norm", run.machine.norm)]
        optimizer = _Optimizer(norm, self._among_replicas("gather", self._times.gather, index))
        weights = WeightVersions([_Pointer()], limit=delay + 1)
        gradients = _Gradients(self._among_replicas("reduction", self._times.reduction))
        routers = RouterBiases(torch.nn.Module(), None, 0.0)  # type: ignore[arg-type]
        common: dict[str, Any] = {"weights": weights, "accumulators": Accumulators(gradients, routers, None)}  # type: ignore[arg-type]
        deferred = update.DeferredUpdate(
            index=index,
            chunk=torch.nn.Module(),
            optimizer=optimizer,  # type: ignore[arg-type]
            master_step=self.step,  # type: ignore[arg-type]
            corrected=lambda _: False,
            rule=UpdateRule(1.0, False, stage_norm=alone, lag=run.stages if alone else 0),
            launch=run.launch,
            **common,
        )
        return executor.Chunk(
            module=None,
            data_iterator=None,
            first=self._stage == 0 and index == 0,
            last=self._stage == run.stages - 1 and index == definition.chunks - 1,
            update=deferred,
            **common,
        )

    def _among_replicas(self, kind: str, time: float, chunk: int | None = None) -> Group:
        """Chunks share Megatron's data-parallel group. Groups of updates are their own."""
        name = f"{kind} of stage {self._stage}, chunk {chunk}"
        return Group(name, self._run.replicas, kind, time / self._definition.chunks)


class _Pointer:
    target = torch.zeros(1)

    def point(self, target: torch.Tensor) -> None:
        self.target = target


class _Gradients:
    """As `GradientGenerations`, of one element."""

    def __init__(self, group: Group) -> None:
        settings = SimpleNamespace(average_in_collective=False, use_distributed_optimizer=False)
        buffer = SimpleNamespace(
            data_parallel_group=group, data_parallel_world_size=2, gradient_scaling_factor=1.0, ddp_config=settings
        )
        self._flat = SimpleNamespace(buffer=buffer, data=torch.ones(1), buckets=())

    def flat(self, batch: int) -> list[Any]:
        return [self._flat]

    def use(self, batch: int) -> None: ...
    def clear(self, batch: int) -> None: ...
    def reading(self, batch: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class _Optimizer:
    """As Megatron's optimizer, with the groups of its norm and of its gather."""

    def __init__(self, group: Group, gather: Group) -> None:
        self.group, self.gather = group, gather

    def prepare_grads(self) -> None: ...
    def zero_grad(self) -> None: ...
    def get_grads_for_grad_norm(self) -> list[torch.Tensor]:
        rank_here().burst("norm", 0.0, _NORM_LAUNCHES)
        return [torch.ones(1)]


def _forward_step(*_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    rank_here().stage.compute("F")
    return torch.zeros(1), torch.zeros((), dtype=torch.int)


def _backward_step(*_: Any) -> torch.Tensor:
    rank_here().stage.compute("B")
    return torch.zeros(1)


def _publish(optimizer: _Optimizer) -> None:
    if optimizer.gather.latency:
        start(optimizer.gather).wait()


def _edges(keys: Sequence[Any]) -> list[Group]:
    transfer = rank_here().machine.transfer
    return [Group(f"{key.purpose} {key.ranks}", 2, "transfer", transfer) for key in keys]


@contextlib.contextmanager
def _simulated() -> Iterator[None]:
    """torch and Megatron as the pipeline sees them, for all threads."""
    replaced: list[tuple[Any, dict[str, Any]]] = [
        (torch, {"get_device_module": lambda *_: Streams}),
        (torch.cuda, {"Event": Event}),
        (
            dist,
            {
                "isend": lambda tensor, dst, group: start(group),
                "irecv": lambda tensor, src, group: start(group),
                "all_reduce": lambda tensor, group, async_op, op=None: start(group),
                "get_rank": lambda: rank_here().number,
                "get_process_group_ranks": lambda group: (0,),
            },
        ),
        (host, {"HostValues": HostValues}),
        (links, {"make_groups": _edges}),
        (
            collectives,
            {
                "HostValues": HostValues,
                "make_groups": lambda keys: rank_here().stage.groups_of_update,
                "mpu": SimpleNamespace(
                    get_tensor_model_parallel_group=lambda: None, get_tensor_model_parallel_rank=lambda: 0
                ),
                "tied_embedding": lambda chunk: None,
                "gathering_buckets": lambda chunk: [],
                "norm_groups": lambda optimizer: [(optimizer, optimizer.group)],
            },
        ),
        (
            update,
            {
                "device": lambda: torch.device("cuda"),
                "gathers_whole_parameters": lambda optimizer: False,
                "gathering_buckets": lambda chunk: [],
                "reduce_over_tensor_parallel": lambda chunk: None,
                "publish_weights": _publish,
            },
        ),
        (
            executor,
            {
                "megatron_forward_step": _forward_step,
                "backward_step": _backward_step,
                "get_model_config": lambda module: SimpleNamespace(deallocate_pipeline_outputs=False),
                "time": SimpleNamespace(
                    sleep=lambda _: rank_here().sleep(_INTERVAL), monotonic=lambda: rank_here().simulation.now / 1000
                ),
            },
        ),
    ]
    with contextlib.ExitStack() as stack:
        for owner, values in replaced:
            for name, value in values.items():
                stack.enter_context(mock.patch.object(owner, name, value))
        yield
