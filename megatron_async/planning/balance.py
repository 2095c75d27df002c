# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""`--pipeline-balance`: split the layers over the stages so that the slowest one is fastest, within the memory."""

import argparse
import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_async.checkpoint.manifest import arguments_as_json
from megatron_async.models import hybrid
from megatron_async.planning import devices, split
from megatron_async.planning.costs import CostModel
from megatron_async.planning.devices import Device
from megatron_async.planning.judge import SIMULATIONS, fastest, pairs
from megatron_async.planning.memory import StageMemory
from megatron_async.planning.parameters import Block, blocks
from megatron_async.planning.resolve import microbatches_of, pad_vocabulary
from megatron_async.planning.split import Ends, cut, on_ranks, option
from megatron_async.planning.timing import BlockTime, Exchange, batch_time, of_batch, stage_costs
from megatron_async.schedules.arguments import schedule_of

GIVEN = "given"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


class NoSplit(ValueError):
    """No split keeps every stage within the memory.

    Args:
        args: the run.
        limit: bytes of a device.
        least: bytes of the fullest device in the split that needs the least.
    """

    def __init__(self, args: argparse.Namespace, limit: int, least: int) -> None:
        self.least = least
        super().__init__(
            f"no split of {args.num_layers} layers over {args.pipeline_model_parallel_size} stages keeps every device "
            f"within {limit / 2**30:.1f} GiB: the fullest one needs at least {least / 2**30:.1f} GiB"
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """A split: ends of its parts in the row of blocks, and largest bytes on a device."""

    ends: Ends
    bytes: int


def variant(args: argparse.Namespace, **changes: Any) -> argparse.Namespace:
    """A copy of checked arguments with other values."""
    changed = copy.copy(args)
    vars(changed).update(changes)
    return changed


def begin(args: argparse.Namespace) -> Iterator[str]:
    """Resolve `--pipeline-balance` of parsed values and set a first split, so that Megatron can derive the rest.

    Yields problems. Without the option, delayed schedules on GPUs are balanced unless the user gives a split: under
    them a stage that is slower than the others is the only bubble. 1f1b splits as Megatron does. So do runs on CPUs,
    where FLOPs do not predict the times of miniatures.
    """
    asked, stages = args.pipeline_balance, args.pipeline_model_parallel_size
    given = [name for name in split.ARGUMENTS if getattr(args, name, None)]
    pattern: str | None = args.hybrid_layer_pattern
    if pattern is not None and hybrid.layers_of(pattern) != pattern:
        given.append("hybrid_layer_pattern")
    balanced = asked in ("auto", "measured")
    if balanced and given:
        yield (
            f"--pipeline-balance {asked} with --{given[0].replace('_', '-')}: it has a split of its own. Leave one of "
            "them out."
        )
    if balanced and stages < 2:
        yield (
            f"--pipeline-balance {asked} with --pipeline-model-parallel-size {stages}: one stage holds all layers. "
            "Leave it out, or give at least 2 stages."
        )
    if asked is None:
        asked = "auto" if schedule_of(args).delayed and stages > 1 and args.plan_device != "cpu" else "even"
    args.pipeline_balance = GIVEN if given else asked
    parts, layers = schedule_of(args).chunks * stages, (args.num_layers or 0) if pattern is None else len(pattern)
    if args.pipeline_balance in ("auto", "measured") and stages > 1 and layers + 1 >= parts:
        ends = cut(layers + 2, parts, lambda part, start, end: float(end - start))
        assert ends is not None
        _put(args, ends)


def split_option(args: argparse.Namespace, ends: Ends) -> tuple[str, str]:
    """A split of a run's model as option and value."""
    pattern = args.hybrid_layer_pattern
    return option(ends, None if pattern is None else hybrid.layers_of(pattern))


def _put(args: argparse.Namespace, ends: Ends) -> None:
    name, value = split_option(args, ends)
    setattr(args, name.removeprefix("--").replace("-", "_"), value)


def finish(args: argparse.Namespace) -> None:
    """Replace the first split by the estimated one, once all values are derived.

    Called again when the tokenizer has told the size of the vocabulary. Must not be called where torch.distributed is
    in use.
    """
    if args.pipeline_balance not in ("auto", "measured"):
        return
    known = with_vocabulary(args)
    if getattr(args, "_balance_vocabulary", None) == known.padded_vocab_size:
        return
    args._balance_vocabulary = known.padded_vocab_size
    device, model = devices.find(args.plan_device), blocks(known)
    settle(args, device, model, CostModel(known, device).blocks(model))


def with_vocabulary(args: argparse.Namespace) -> argparse.Namespace:
    """A copy whose padded vocabulary is set."""
    known = variant(args)
    known.vocab_size = known.vocab_size or known.make_vocab_size_divisible_by
    pad_vocabulary(known)
    return known


def settle(args: argparse.Namespace, device: Device, model: Sequence[Block], times: Sequence[BlockTime]) -> None:
    """Set the split for these times and keep a text about it; where none fits the memory, take the fastest one."""
    known, notes = with_vocabulary(args), []
    try:
        chosen = choose(known, model, times, device.memory_bytes)
    except NoSplit as problem:
        notes = [f"{problem}. {would_fit(known, model, device.memory_bytes)}."]
        chosen = choose(known, model, times, None)
    _put(args, chosen.ends)
    args._resolved = arguments_as_json(args)
    args._balance = [*report(known, chosen.ends, times, CostModel(known, device).exchange(model)), *notes]


def report(args: argparse.Namespace, ends: Ends, times: Sequence[BlockTime], exchange: Exchange) -> list[str]:
    """A split in words: the share of each stage, and the idle time that is left."""
    stages = args.pipeline_model_parallel_size
    parts = on_ranks(times, ends, stages)
    totals = of_batch(stage_costs(parts), microbatches_of(args))
    time = batch_time(args.pipeline_schedule, parts, microbatches_of(args), exchange)
    measured = args.pipeline_balance == "measured"
    name, value = split_option(args, ends)
    words = value.split("|")
    lines = [
        f"{name} '{value}' by --pipeline-balance {args.pipeline_balance}, "
        + ("timed on this device" if measured else f"estimated for {args.plan_device}")
    ]
    for stage, total in enumerate(totals):
        share = f"{total / max(totals):.1%} of the slowest stage's time"
        lines.append(f"stage {stage}: {' and '.join(own or 'no layer' for own in words[stage::stages])}, {share}")
    return [*lines, f"planned batch: {1000 * time.seconds:.4g} ms", f"idle: {time.idle_text}"]


def choose(
    args: argparse.Namespace,
    model: Sequence[Block],
    times: Sequence[BlockTime],
    limit: int | None = None,
    simulations: int = SIMULATIONS,
) -> Choice:
    """The balanced split of checked arguments.

    Args:
        times: of each block of `model`.
        limit: bytes of a device; None for no limit.
        simulations: see SIMULATIONS.

    Raises:
        NoSplit: see there.
    """
    held = StageMemory(args, model)
    stages, totals = args.pipeline_model_parallel_size, [own.of_batch(microbatches_of(args)) for own in times]
    if schedule_of(args).chunks > 1:
        unit = sum(totals) or 1.0
        splits: Iterable[Ends] = pairs(
            args.pipeline_schedule, tuple(round(own / unit, 4) for own in totals), stages, simulations
        )
    else:
        splits = _cuts(args, times, held, limit)
    least: float = float("inf")
    for ends in splits:
        size = held.largest(ends)
        if limit is None or size <= limit:
            return Choice(ends, size)
        least = min(least, size)
    assert limit is not None
    raise NoSplit(args, limit, held.least() if schedule_of(args).chunks == 1 else int(least))


def _cuts(args: argparse.Namespace, times: Sequence[BlockTime], held: StageMemory, limit: int | None) -> Iterator[Ends]:
    """The fastest split, then the fastest that fit the memory, each with more room than the one before."""
    run = args.pipeline_schedule, times, args.pipeline_model_parallel_size, microbatches_of(args)
    if (ends := fastest(*run)) is not None:
        yield ends
    for room in (1.0, 0.98, 0.95, 0.9) if limit is not None else ():
        bound = room * (limit or 0)
        if (ends := fastest(*run, lambda *where, bound=bound: held.part(*where) <= bound)) is None:
            return  # nothing fits into less either
        yield ends


def would_fit(args: argparse.Namespace, model: Sequence[Block], limit: int) -> str:
    """Changes of a run that does not fit after which it would."""
    changes: dict[str, dict[str, Any]] = {
        RECOMPUTE: {"recompute_granularity": "full"},
        "--use-distributed-optimizer": {"use_distributed_optimizer": True},
    }
    fitting = []
    for words, change in changes.items():
        if schedule_of(args).chunks == 1 and any(getattr(args, name) != value for name, value in change.items()):
            least = StageMemory(variant(args, **change), model).least()
            if least <= limit:
                fitting.append(f"{words} ({least / 2**30:.1f} GiB)")
    if fitting:
        return f"Would fit: {'; '.join(fitting)}"
    return "Use more stages or tensor-parallel ranks, smaller micro-batches, or larger devices"
