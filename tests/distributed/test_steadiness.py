# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Over many batches nothing grows: tensors, Python objects, open files."""

import gc
import os
import shlex
import tracemalloc
from dataclasses import dataclass
from unittest import mock

from benchmarks.processes import Pool
from tests.distributed.jobs import BASE

RUN = """--pipeline-model-parallel-size 2 --pipeline-schedule 2bw --staleness-correction error-feedback --optimizer muon
    --global-batch-size 4 --log-interval 1000000 --log-stage-balance 25"""


@dataclass(frozen=True, slots=True)
class State:
    """What a rank holds: tensors that Python reaches, bytes of their storages and of Python's objects, open files."""

    tensors: int
    tensor_bytes: int
    python_bytes: int
    handles: int


def observe(batches: int, samples: int) -> list[State]:
    """Job: train with all reports; return the state after each of `samples` equal parts of the run."""
    from megatron_async.config import arguments
    from megatron_async.training import run, stage_balance
    from megatron_async.training.callbacks import Callback, CompletedBatch
    from megatron_async.training.signals import StopRequests

    states: list[State] = []

    class Observer(Callback):
        def on_batch_end(self, batch: CompletedBatch) -> None:
            if batch.iteration % (batches // samples) == 0:
                states.append(state())

    line = [*BASE, *shlex.split(RUN), "--train-iters", str(batches)]
    tracemalloc.start()
    with mock.patch.object(stage_balance, "SLOW", -0.5):  # every report has a hint
        run.pretrain(arguments.parse(line), StopRequests(), [Observer()])
    tracemalloc.stop()
    return states


def state() -> State:
    import torch

    gc.collect()
    # isinstance would ask lazily loading modules for their class.
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return State(
        tensors=len(tensors),
        tensor_bytes=sum(storages.values()),
        python_bytes=tracemalloc.get_traced_memory()[0],
        handles=len(os.listdir("/proc/self/fd")),
    )


def test_two_hundred_batches_leave_nothing_behind(pool: Pool) -> None:
    for states in pool.run(f"{__name__}:observe", 200, 4, ranks=2, timeout=400):
        first, *later = states[1:]  # the first quarter still fills caches
        for state in later:
            assert state.tensors <= first.tensors + 8  # micro-batches and losses in flight
            assert state.tensor_bytes <= 1.02 * first.tensor_bytes
            assert state.python_bytes <= first.python_bytes + 40_000
            assert state.handles <= first.handles
