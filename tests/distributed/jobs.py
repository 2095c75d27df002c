# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Jobs for the worker pool."""

import contextlib
import dataclasses
import functools
import inspect
import os
import pickle
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np

# A model small enough for many runs, with everything the schedules have to get right: several layers a stage,
# clipping that is active in some steps, warm-up, decay and weight decay.
BASE = (
    "--device cpu --num-layers 4 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 8 --train-iters 6 --lr 0.02 --min-lr 0.002 "
    "--lr-decay-style cosine --lr-warmup-iters 2 --weight-decay 0.1 --clip-grad 1.0 --attention-dropout 0 "
    "--hidden-dropout 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 61 --make-vocab-size-divisible-by 8 "
    "--eval-interval 1000 --eval-iters 0 --num-workers 0 --normalization RMSNorm --swiglu --disable-bias-linear "
    "--position-embedding-type rope --seed 7"
).split()


@dataclass
class Outcome:
    """What a rank saw of a run: losses are empty on ranks without the loss, weights are those of its stage."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    weights: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    tensor_rank: int = 0
    random_states: dict[str, bytes] = field(default_factory=dict)
    status: int = 0


def small_corpus() -> None:
    """Set up a worker. Megatron's mock data are reduced to 1,000 documents: 100,000 make 13 million sequences, shuffled
    for every run."""
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    MockGPTLowLevelDataset.size = 1000
    inspect.getsource = functools.cache(inspect.getsource)  # as in tests/conftest.py


SMALL_CORPUS = "tests.distributed.jobs:small_corpus"
"""Set-up of the workers that run these jobs."""


@contextlib.contextmanager
def whole_corpus() -> Iterator[None]:
    """Megatron's mock data in full (see `small_corpus`), for tests that depend on its first sequences."""
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    small, MockGPTLowLevelDataset.size = MockGPTLowLevelDataset.size, 100_000
    try:
        yield
    finally:
        MockGPTLowLevelDataset.size = small


def line(arguments: Sequence[str], base: Sequence[str] = BASE) -> list[str]:
    """The base arguments and `arguments`, which may name data files or count the run in samples."""
    words = " ".join(word for word in base if word != "--mock-data" or "--train-data-path" not in arguments)
    if "--train-samples" in arguments:
        for counted in ("--global-batch-size 8", "--train-iters 6", "--lr-warmup-iters 2"):
            words = words.replace(f"{counted} ", "")
    return [*words.split(), *arguments]


def train_on_whole_corpus(arguments: Sequence[str]) -> Outcome:
    """As `train`."""
    with whole_corpus():
        return train(arguments)


def unequal_tied_copies(arguments: Sequence[str]) -> str:
    """The error of a run whose stages load different embeddings."""
    import torch.distributed as dist

    from megatron_async.config import arguments as command_line
    from megatron_async.mcore.model import tied_embedding
    from megatron_async.training import run
    from megatron_async.training.faults import TrainingFault

    def disturb(self: Any) -> None:
        tied_embedding(self._model[0]).data.add_(1e-6 * dist.get_rank())

    with mock.patch.object(run.Checkpoints, "load", disturb):
        try:
            run.build(command_line.parse(line(arguments)))
        except TrainingFault as error:
            return str(error)
        finally:
            run.close()
    return "none"


def unequal_replicas(arguments: Sequence[str]) -> tuple[str, int]:
    """The error of a run in which one rank's weights change by themselves in batch 1, and the iteration."""
    import torch.distributed as dist

    from megatron_async.config import arguments as command_line
    from megatron_async.training import run
    from megatron_async.training.callbacks import Callback, CompletedBatch
    from megatron_async.training.faults import TrainingFault

    class Fault(Callback):
        def on_batch_end(self, batch: CompletedBatch) -> None:
            if batch.number == 1 and dist.get_rank() == dist.get_world_size() - 1:
                next(loop.model[0].parameters()).data[0] += 1e-6

    loop = run.build(command_line.parse(line(arguments)), callbacks=[Fault()])
    try:
        loop.run()
    except TrainingFault as error:
        return str(error), loop.args.iteration
    finally:
        run.close()
    return "none", loop.args.iteration


def train_without_launcher(arguments: Sequence[str]) -> Outcome:
    """As `train`, in a process that nobody told about others."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    return train(arguments)


def train(
    arguments: Sequence[str], sleep_ms: float = 0.0, callbacks: Sequence[Any] = (), base: Sequence[str] = BASE
) -> Outcome:
    """Train with the base arguments and `arguments`; before every action, sleep up to `sleep_ms`."""
    from megatron.core import mpu

    from megatron_async.config import arguments as command_line
    from megatron_async.training import run

    outcome = Outcome()
    callbacks = [observer(outcome), *([staller(sleep_ms)] if sleep_ms else []), *callbacks]
    loop = run.build(command_line.parse(line(arguments, base)), callbacks=callbacks)
    outcome.status = loop.run()
    outcome.random_states = _random_states()
    outcome.weights = weights_of(loop.model)
    outcome.tensor_rank = mpu.get_tensor_model_parallel_rank()
    run.close()
    return outcome


def weights_of(model: Sequence[Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Weights of this rank's model chunks by their names in the whole model."""
    from megatron.core.utils import unwrap_model

    from megatron_async.models.naming import global_names

    named = [pair for chunk in unwrap_model(list(model)) for pair in global_names(chunk)]
    return {name: param.detach().float().cpu().numpy().copy() for name, param in named}


def _random_states() -> dict[str, bytes]:
    """Bytes of every generator whose state must survive a resume."""
    import torch
    from megatron.core import tensor_parallel

    states = {
        "python": repr(random.getstate()).encode(),
        "numpy": pickle.dumps(np.random.get_state()),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    tracked = tensor_parallel.get_cuda_rng_tracker().get_states()
    return states | {name: state.numpy().tobytes() for name, state in tracked.items()}


def observer(outcome: Outcome) -> Any:
    """A callback that notes in `outcome` what this rank sees of a run."""
    from megatron.core import mpu

    from megatron_async.training.callbacks import Callback, CompletedBatch
    from megatron_async.training.metrics import pending_loss

    class Observer(Callback):
        def on_losses(self, batch: int, losses: Any) -> None:
            group = mpu.get_data_parallel_group(with_context_parallel=True)
            outcome.losses.append(pending_loss([part["lm loss"] for part in losses], group).read()[0])

        def on_batch_end(self, batch: CompletedBatch) -> None:
            outcome.grad_norms.append(batch.grad_norm)
            outcome.learning_rates.append(batch.learning_rate)
            outcome.skipped.append(batch.skipped)

        def on_evaluation_end(self, iteration: int, loss: float | None) -> None:
            if loss is not None:
                outcome.validation.append((iteration, loss))

    return Observer()


def staller(sleep_ms: float) -> Any:
    """A callback that sleeps up to `sleep_ms` before every action."""
    from megatron_async.training.callbacks import Callback

    class Staller(Callback):
        generator = random.Random(time.time_ns())

        def on_action(self, kind: str, batch: int) -> None:
            time.sleep(self.generator.random() * sleep_ms / 1000)

    return Staller()


def initial_state(
    arguments: Sequence[str], batches: int
) -> tuple[dict[str, np.ndarray[Any, Any]], list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]]:
    """Initial weights of a one-process run, and (tokens, labels) [samples, sequence] of its first batches."""
    from megatron.core.utils import unwrap_model

    from megatron_async.config import arguments as command_line
    from megatron_async.models.naming import global_names
    from megatron_async.training import run

    args = command_line.parse(line(arguments))
    loop = run.build(args)
    (model,) = unwrap_model(loop.model)
    weights = {name: param.detach().numpy().copy() for name, param in global_names(model)}
    data = []
    for _ in range(batches):
        samples = [next(loop.data.train[0]) for _ in range(args.global_batch_size // args.micro_batch_size)]
        data.append(tuple(np.concatenate([sample[key].numpy() for sample in samples]) for key in ("tokens", "labels")))
    loop.end()
    run.close()
    return weights, data


def command(arguments: Sequence[str]) -> tuple[int, str]:
    """Exit status of the entry point with exactly these arguments, and what it wrote to stderr."""
    import contextlib
    import io

    from megatron_async import pretrain

    written = io.StringIO()
    with contextlib.redirect_stderr(written):
        status = pretrain.main(list(arguments))
    return status, written.getvalue()


# Collectives that wait unless told otherwise; point-to-point calls that always do.
_WAITING = (
    "all_reduce",
    "broadcast",
    "barrier",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "reduce",
)
_WAITING += ("all_gather_object", "broadcast_object_list", "gather_object", "send", "recv", "monitored_barrier")


def blocking_calls(arguments: Sequence[str]) -> list[str]:
    """Calls that made this rank wait for another stage in steady state: after the third update, before the last two."""
    import inspect

    import torch.distributed as dist
    from megatron.core import mpu

    from megatron_async.config import arguments as command_line
    from megatron_async.training import run
    from megatron_async.training.callbacks import Callback, CompletedBatch

    class Counter(Callback):
        def on_batch_end(self, batch: CompletedBatch) -> None:
            nonlocal completed
            completed += 1

    args = command_line.parse([*BASE, *arguments])
    loop = run.build(args, callbacks=[Counter()])
    stages = [0] * dist.get_world_size()
    dist.all_gather_object(stages, mpu.get_pipeline_model_parallel_rank())
    found: list[str] = []
    completed = 0

    def watched(name: str) -> Any:
        original = getattr(dist, name)
        signature = inspect.signature(original)

        def call(*values: Any, **options: Any) -> Any:
            given = signature.bind(*values, **options).arguments
            ranks = dist.get_process_group_ranks(given.get("group"))
            crosses = len({stages[rank] for rank in ranks}) > 1
            if 3 <= completed <= args.train_iters - 2 and crosses and not given.get("async_op", False):
                found.append(name)
            return original(*values, **options)

        return call

    with mock.patch.multiple(dist, **{name: watched(name) for name in _WAITING}):
        loop.run()
    run.close()
    return found


@contextlib.contextmanager
def changed_data(change: Callable[[Iterator[Any]], Iterator[Any]]) -> Iterator[None]:
    """Runs that are built inside get `change(iterator)` for every data iterator."""
    from megatron_async.training import run

    build = run.data_iterators

    def changed(args: Any) -> Any:
        def each(iterators: Sequence[Any]) -> list[Any]:
            return [None if iterator is None else change(iterator) for iterator in iterators]

        data = build(args)
        valid = [dataclasses.replace(part, data=each(part.data)) for part in data.valid]
        return dataclasses.replace(data, train=each(data.train), valid=valid)

    run.data_iterators = changed
    try:
        yield
    finally:
        run.data_iterators = build


def train_masked(arguments: Sequence[str]) -> Outcome:
    """`train` on data in which micro-batches have different numbers of tokens that count, some of them none."""

    def masked(data: Iterator[Any]) -> Iterator[Any]:
        for batch in data:
            some = batch["labels"].sum(dim=1, keepdim=True) % 4 != 0
            yield batch | {"loss_mask": batch["loss_mask"] * (batch["labels"] % 3 != 0) * some}

    with changed_data(masked):
        return train_on_whole_corpus(arguments)


def exchange(elements: int, steps: int, late: int | None) -> int:
    """Messages over the links of a pipeline, activations and gradients in turns as in 1F1B, each with a stamp.

    Args:
        elements: of each message, fp32.
        late: this stage sleeps for a second before it takes anything.

    Returns:
        How many of those that arrived carried another stamp than expected.
    """
    import torch
    import torch.distributed as dist

    from megatron_async.pipeline.links import Message, connect

    def stamp(sender: int, step: int, backward: bool) -> float:
        return float((sender * steps + step) * 2 + backward)

    dist.init_process_group("gloo")
    rank, stages = dist.get_rank(), dist.get_world_size()
    message = Message((elements,), torch.float32, torch.device("cpu"))
    links = connect(list(range(stages)), rank, message, sends_in_flight=2)
    first, last, wrong, ahead = rank == 0, rank == stages - 1, 0, stages - 1 - rank
    if rank == late:
        time.sleep(1.0)
    links.forward.expect(0 if first else steps)
    links.backward.expect(0 if last else steps)
    for slot in range(steps + ahead):
        if slot < steps:
            if not first:
                wrong += bool((links.forward.receive() != stamp(rank - 1, slot, False)).any())
            if not last:
                links.forward.send(torch.full((elements,), stamp(rank, slot, False)))
        if (step := slot - ahead) >= 0:
            if not last:
                wrong += bool((links.backward.receive() != stamp(rank + 1, step, True)).any())
            if not first:
                links.backward.send(torch.full((elements,), stamp(rank, step, True)))
    links.drain()
    dist.barrier()
    dist.destroy_process_group()
    return wrong


def crossed_sums() -> list[float]:
    """Two sums over all ranks at a time, which every other rank starts in the other order."""
    import torch
    import torch.distributed as dist

    from megatron_async.platform.groups import GroupKey, make_groups

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    everyone = tuple(range(dist.get_world_size()))
    groups = make_groups([GroupKey(name, everyone) for name in ("first", "second")])
    sums = [torch.tensor([1.0]), torch.tensor([10.0])]
    for _ in range(20):
        order = [0, 1] if rank % 2 else [1, 0]
        works = [dist.all_reduce(sums[index], group=groups[index], async_op=True) for index in order]
        for work in works:
            work.wait()
        sums = [value / dist.get_world_size() for value in sums]
    dist.barrier()
    dist.destroy_process_group()
    return [float(value) for value in sums]
