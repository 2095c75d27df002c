# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Whether anything grows over many batches: memory, open handles, time per batch."""

import gc
import os
import shlex
import statistics
import tracemalloc
from dataclasses import dataclass
from typing import Any

import torch

from megatron_async.config import arguments
from megatron_async.training import run

MODEL = """--device cpu --num-layers 4 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --seq-length 16
    --max-position-embeddings 16 --micro-batch-size 1 --pipeline-model-parallel-size 2 --pipeline-schedule 2bw
    --staleness-correction error-feedback --optimizer muon --lr 1e-3 --clip-grad 1.0 --mock-data --swiglu
    --tokenizer-type NullTokenizer --vocab-size 61 --make-vocab-size-divisible-by 8 --eval-iters 0
    --eval-interval 1000000 --attention-dropout 0 --hidden-dropout 0 --disable-bias-linear --normalization RMSNorm
    --position-embedding-type rope --log-interval 1000000"""


@dataclass(frozen=True, slots=True)
class State:
    """What a rank holds at one moment, and what the batches before it took.

    Attributes:
        tensors: tensors that Python can reach.
        tensor_bytes: of their distinct storages.
        python_bytes: traced by tracemalloc.
        handles: open file descriptors.
        ms_median: per batch since the last state.
    """

    batch: int
    tensors: int
    tensor_bytes: int
    python_bytes: int
    handles: int
    ms_median: float


def observe(batches: int, samples: int, extra: str = "") -> list[State]:
    """Train on this rank; return its state after each of `samples` equal parts of the run.

    Args:
        batches: length of the run.
        samples: how many states.
        extra: further arguments of the run.
    """
    line = f"{MODEL} --global-batch-size 4 --train-iters {batches} {extra}"
    loop = run.build(arguments.parse(shlex.split(line)))
    states: list[State] = []
    milliseconds: list[float] = []
    every, forward = batches // samples, loop.metrics.batch
    tracemalloc.start()

    def note(numbers: Any) -> None:
        forward(numbers)
        milliseconds.append(numbers.elapsed * 1e3)
        if numbers.iteration % every == 0:
            states.append(_state(numbers.iteration, milliseconds))
            milliseconds.clear()

    loop.metrics.batch = note  # type: ignore[method-assign]
    loop.run()
    tracemalloc.stop()
    loop.metrics.close()
    run.close()
    return states


def _state(batch: int, milliseconds: list[float]) -> State:
    gc.collect()
    # isinstance would ask lazily loading modules for their class.
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return State(
        batch=batch,
        tensors=len(tensors),
        tensor_bytes=sum(storages.values()),
        python_bytes=tracemalloc.get_traced_memory()[0],
        handles=len(os.listdir("/proc/self/fd")),
        ms_median=statistics.median(milliseconds),
    )
