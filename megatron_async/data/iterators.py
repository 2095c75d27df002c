# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The micro-batches of a run: training, validation sets, test set, each in an order that a resumed run keeps.

Megatron shuffles by the number of samples that a run asks for. That number is saved in checkpoints as
`data_order_samples`, so a run of another length reads the same samples in the same order.
"""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.datasets.utils import Split

from megatron_async.data.datasets import train_valid_test_datasets
from megatron_async.mcore.arguments import overridden
from megatron_async.mcore.batch_sizes import BatchSizes
from megatron_async.mcore.rng import fork_rng
from megatron_async.mcore.training import build_pretraining_data_loader


class OrderEnds(RuntimeError):
    """The order of samples that a checkpoint belongs to ends before the run."""


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """Data of one loss.

    Attributes:
        name: empty for the one validation set; else that of `--validation-set-names`, a number, or "test".
        data: iterator over micro-batches, one for each model chunk; None where a chunk needs no data.
        batches: batches of one evaluation.
    """

    name: str
    data: list[Any]
    batches: int


@dataclass(frozen=True, slots=True)
class RunData:
    """Data of a run: iterators over training micro-batches for each model chunk, and what it evaluates on the way and
    at its end."""

    train: list[Any]
    valid: list[EvaluationSet]
    test: list[EvaluationSet]


def run_data(args: argparse.Namespace, tokenizer: Any) -> RunData:
    """Build the data of a run at its position. Collective.

    Sets `args.data_order_samples` and `args.valid_order_samples`, for which the orders are drawn.

    Raises:
        OrderEnds: on every rank, if `args.data_order_samples` gives fewer samples than the run needs.
    """
    needed = train_samples(args)
    args.data_order_samples = args.data_order_samples or max(1, needed)
    args.valid_order_samples = max(getattr(args, "valid_order_samples", 0), _valid_samples(args))
    stages = range(args.virtual_pipeline_model_parallel_size or 1)
    virtual = args.virtual_pipeline_model_parallel_size is not None
    sets = [_datasets(args, tokenizer, stage if virtual else None) for stage in stages]
    train_length, valid_lengths, test_length = _lengths(sets)
    if not args.skip_train and train_length < needed:
        raise OrderEnds(_order_ends(args, needed, train_length))
    ended = args.skip_train or args.consumed_train_samples >= train_length
    train = [None if ended else _iterator(args, train, args.consumed_train_samples) for train, _, _ in sets]
    names = [""] if not args.multiple_validation_sets else args.validation_set_names or range(len(valid_lengths))
    valid = [
        _validation(args, str(name), [valid[index] if valid else None for _, valid, _ in sets], valid_lengths[index])
        for index, name in enumerate(names[: len(valid_lengths)])
        if args.full_validation or args.eval_iters
    ]
    test = [_iterator(args, test, 0) for _, _, test in sets] if test_length and args.eval_iters else []
    return RunData(train, valid, [EvaluationSet("test", test, args.eval_iters)] if test else [])


def train_samples(args: argparse.Namespace) -> int:
    """Training samples of the whole run."""
    sizes = BatchSizes.of(args)
    if not args.train_samples:
        return sizes.before(args.train_iters or 0)
    # Megatron leaves a last batch out that is not whole, unless batches grow.
    return int(args.train_samples) if len(sizes.steps) == 1 else sizes.before(sizes.batches(args.train_samples))


def _valid_samples(args: argparse.Namespace) -> int:
    """Validation samples up to the end of the run, where a validation set is not read as a whole."""
    evaluations = 1
    if not args.skip_train and args.eval_interval:
        first = max(args.iteration, (args.start_eval_at_iter or 1) - 1)
        evaluations += max(0, args.train_iters // args.eval_interval - first // args.eval_interval)
    return int(args.consumed_valid_samples + evaluations * args.eval_iters * args.eval_global_batch_size)


def _datasets(args: argparse.Namespace, tokenizer: Any, vp_stage: int | None) -> tuple[Any, list[Any], Any]:
    """Training, validation and test sets; None, or no validation set, on ranks and for parts without data."""
    valid_samples = None if args.full_validation else args.valid_order_samples
    samples = args.data_order_samples, valid_samples, args.eval_iters * args.eval_global_batch_size
    train, valid, test = train_valid_test_datasets(args, samples, tokenizer=tokenizer, vp_stage=vp_stage)
    valid = valid if isinstance(valid, list) else [valid]
    return train, [dataset for dataset in valid if dataset is not None], test


def _lengths(sets: Sequence[tuple[Any, list[Any], Any]]) -> tuple[int, list[int], int]:
    """Samples of training, of each validation set and of the test set, on every rank. Collective."""

    def length(dataset: Any) -> int:
        return 0 if dataset is None else len(dataset)

    own = [(length(train), [len(dataset) for dataset in valid], length(test)) for train, valid, test in sets]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, max(own))
    return max(gathered)  # a rank with data knows all lengths, one without has zeros


def _order_ends(args: argparse.Namespace, needed: int, length: int) -> str:
    asked = f"--train-samples {args.train_samples}" if args.train_samples else f"--train-iters {args.train_iters}"
    return (
        f"{asked} needs {needed} training samples, but the order of samples was drawn for {args.data_order_samples} "
        f"and ends after {length}. Give --data-order-samples {needed} to draw another order for the rest of the run "
        f"(some samples repeat, others are left out), or train no further than {length} samples. To extend a run "
        "later, give a larger --data-order-samples at its first start."
    )


def _validation(args: argparse.Namespace, name: str, parts: list[Any], length: int) -> EvaluationSet:
    """A validation set, `parts` for each model chunk: continued where it stopped, or a whole pass each time."""
    if not args.full_validation:
        data = [_iterator(args, part, 0 if args.skip_train else args.consumed_valid_samples) for part in parts]
        return EvaluationSet(name, data, args.eval_iters)
    batches = -(-length // args.eval_global_batch_size)
    padded = [None if part is None else _Padded(part, batches * args.eval_global_batch_size) for part in parts]
    with overridden(args, full_validation=False, dataloader_type="single"):
        return EvaluationSet(name, [_iterator(args, part, 0, again=True) for part in padded], batches)


class _Padded(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A validation set filled up to whole batches with samples of which no token counts."""

    index_split = Split.valid

    def __init__(self, dataset: Any, length: int) -> None:
        self._dataset, self._length = dataset, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample: dict[str, torch.Tensor] = self._dataset[min(index, len(self._dataset) - 1)]
        if index < len(self._dataset):
            return sample
        return sample | {"loss_mask": torch.zeros_like(sample["loss_mask"])}


def _iterator(args: argparse.Namespace, dataset: Any, consumed: int, *, again: bool = False) -> Iterator[Any] | None:
    """An iterator over micro-batches from a position on, over whole passes with `again`; None without data."""
    loader = build_pretraining_data_loader(dataset, consumed)
    if loader is None:
        return None
    return _undisturbing(repeat(loader) if again or args.dataloader_type == "cyclic" else [loader])


def _undisturbing(loaders: Iterable[Any]) -> Iterator[Any]:
    """The batches of loaders one after the other. Restores the RNG states, from which loaders draw seeds."""
    batches = chain.from_iterable(loaders)
    while True:
        with fork_rng():
            batch = next(batches, None)
        if batch is None:
            return
        yield batch
