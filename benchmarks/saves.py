# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""What checkpoints cost a run: how long the pipeline stops for one, how much longer the run takes, how large one is."""

import math
import shlex
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from benchmarks import training
from benchmarks.processes import Pool
from megatron_async.checkpoint import folder

NONE = "no saves"
VARIANTS: Mapping[str, str] = {
    NONE: "",
    "saves": "--save FOLDER --save-interval INTERVAL",
    "--async-save": "--save FOLDER --save-interval INTERVAL --async-save",
}
RECIPE = f"--pipeline-schedule 2bw --optimizer adam {training.CLIP} {training.ERROR_FEEDBACK}"
_WARM_UP = 3


@dataclass(slots=True)
class Turn:
    """One run of one variant on one rank, in milliseconds.

    Attributes:
        whole: from the end of the warm-up to the end of the last batch that a save's writing may run beside.
        batches: each of those batches by itself, without what happens between two segments.
        stops: how long the pipeline stood still for each save.
    """

    whole: float = 0.0
    batches: list[float] = field(default_factory=list)
    stops: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes of a checkpoint's files, and of the tensors in them."""

    files: int
    tensors: int


@dataclass(frozen=True, slots=True)
class Cost:
    """What the saves of one variant cost, medians over turns on the slowest rank.

    Attributes:
        batch_ms: a batch of the run without saves.
        stop_ms: stop of the pipeline for one save.
        longer_ms: how much longer the run took, for each save: the stop, the drain before it, and what training loses
            to the writing beside it.
    """

    batch_ms: float
    stop_ms: float
    longer_ms: float


def in_turns(
    data: Sequence[str], microbatches: int, rounds: int, interval: int, saves: int, place: Path
) -> tuple[list[dict[str, list[Turn]]], Size | None]:
    """Train every variant in turns, with so many saves in each turn: turns by rank, and the size of a checkpoint."""
    found: list[dict[str, list[Turn]]] = [{name: [] for name in VARIANTS} for _ in range(training.STAGES)]
    last, size = _last(interval, saves), None
    with Pool(pinned=True) as pool:
        for number in range(rounds):
            for name, variant in VARIANTS.items():
                root = place / f"{number}-{name.strip('-').replace(' ', '-')}"
                options = f"{RECIPE} {variant}".replace("FOLDER", shlex.quote(str(root)))
                options = options.replace("INTERVAL", str(interval))
                line = training.command_line(training.MODELS["tiny"], options, data, microbatches, last + 1)
                ranks = pool.run("benchmarks.saves:turn", line, last, ranks=training.STAGES, timeout=300)
                for own, turns in zip(found, ranks, strict=True):
                    own[name].append(turns)
                if root.exists():
                    size = measure(root / folder.name_of(interval))
                    shutil.rmtree(root)
    return found, size


def turn(line: Sequence[str], last: int) -> Turn:
    """Train on this rank."""
    return training.one_run(line, partial(_turn, last=last))


def _last(interval: int, saves: int) -> int:
    """The last timed batch: as many batches follow the last save as lie between two of them."""
    return (saves + 1) * interval - 1


def _turn(loop: Any, last: int) -> Turn:
    turn, began = Turn(), 0.0
    report, save = loop.metrics.batch, loop.checkpoints.save

    def on_batch(numbers: Any) -> None:
        nonlocal began
        report(numbers)
        if numbers.iteration == _WARM_UP:
            began = time.perf_counter()
        elif _WARM_UP < numbers.iteration <= last:
            turn.batches.append(numbers.elapsed * 1e3)
            turn.whole = (time.perf_counter() - began) * 1e3

    def timed(iteration: int, histories: Any) -> None:
        start = time.perf_counter()
        save(iteration, histories)
        if iteration <= last:
            turn.stops.append((time.perf_counter() - start) * 1e3)

    loop.metrics.batch, loop.checkpoints.save = on_batch, timed
    loop.run()
    return turn


def costs(ranks: Sequence[Mapping[str, Sequence[Turn]]], saves: int) -> dict[str, Cost]:
    """The cost of each variant that saves."""
    return {
        name: max((_cost(rank, name, saves) for rank in ranks), key=lambda cost: cost.stop_ms)
        for name in VARIANTS
        if name != NONE
    }


def _cost(rank: Mapping[str, Sequence[Turn]], name: str, saves: int) -> Cost:
    # Turns of the same round stand side by side in time.
    longer = [turn.whole - bare.whole for turn, bare in zip(rank[name], rank[NONE], strict=True)]
    return Cost(
        batch_ms=statistics.median(batch for turn in rank[NONE] for batch in turn.batches),
        stop_ms=statistics.median(stop for turn in rank[name] for stop in turn.stops),
        longer_ms=statistics.median(longer) / saves,
    )


def measure(checkpoint: Path) -> Size:
    """Sizes of one checkpoint."""
    entries = (FileSystemReader(str(checkpoint)).read_metadata().state_dict_metadata or {}).values()
    tensors = [entry for entry in entries if isinstance(entry, TensorStorageMetadata)]
    return Size(
        files=sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file()),
        tensors=sum(math.prod(tensor.size) * tensor.properties.dtype.itemsize for tensor in tensors),
    )
