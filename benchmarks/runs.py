# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Whole training runs in turns on two ranks."""

import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contenders import LIMIT
from benchmarks.processes import Pool
from tools.data.prepare import prepare_corpus

STAGES = 2
VOCABULARY = 5120
"""The quick start's."""

BASE = f"""--device cpu --pipeline-model-parallel-size {STAGES} --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine
    --lr-warmup-iters 2 --weight-decay 0.1 --eval-interval 100000 --eval-iters 0 --log-interval 1"""
_FILL, _DRAIN = 3, 2
"""Batches that fill and drain the pipe and do not count."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model with its split into stages, and its micro-batch."""

    arguments: str
    micro_batch_size: int


MODELS: Mapping[str, Model] = {
    # The quick start's split: the head costs about as much as the two layers that the last stage has fewer.
    "tiny": Model("--model tiny --decoder-first-pipeline-num-layers 5", 16),
    "moe-10b-hybrid-mini": Model("--model moe-10b-hybrid-mini", 8),
}


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to measure.

    Attributes:
        rounds: turns of each run.
        batches: batches of a turn that count.
        folder: for data, logs and checkpoints.
    """

    rounds: int
    batches: int
    folder: Path


def in_turns(model: str, variants: Mapping[str, str], microbatches: int, effort: Effort) -> dict[str, list[list[Any]]]:
    """Train every variant in turns.

    Args:
        model: one of MODELS.
        variants: name -> arguments, in which LOG stands for the path of the turn's files. `LIMIT` runs each stage
            without communication.

    Returns:
        By variant, rank and turn: the batches that count, and the stops for checkpoints, see `jobs.train`.
    """
    found: dict[str, list[list[Any]]] = {name: [[] for _ in range(STAGES)] for name in variants}
    data = prepare_corpus(effort.folder / "corpus", vocab_size=VOCABULARY).megatron_arguments()
    count, size = _FILL + effort.batches + _DRAIN, MODELS[model].micro_batch_size
    sizes = f"--train-iters {count} --micro-batch-size {size} --global-batch-size {size * microbatches}"
    trace = f"--trace-file LOG.trace --trace-batches {count}"
    shutil.rmtree(effort.folder / "logs", ignore_errors=True)
    with Pool(pinned=True) as pool:
        for turn in range(effort.rounds):
            for number, (name, variant) in enumerate(variants.items()):
                log = shlex.quote(str(effort.folder / "logs" / f"{number}-{turn}"))
                job, more = ("alone", "") if name == LIMIT else ("train", trace)
                options = f"{BASE} {MODELS[model].arguments} {sizes} {more} {variant}".replace("LOG", log)
                line = [*shlex.split(options), *data]
                results = pool.run(f"benchmarks.jobs:{job}", line, ranks=STAGES, timeout=150 + 6 * effort.batches)
                for turns, (batches, stops) in zip(found[name], results, strict=True):
                    turns.append((batches[_FILL : _FILL + effort.batches], stops))
    return found
