# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Whole training runs on two ranks: their speed, where the time of a batch goes, how long a checkpoint stops them."""

import shlex
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.contenders import LIMIT
from benchmarks.processes import Pool
from benchmarks.results import ratio, slowest, table
from megatron_async.data.preprocessing.prepare import prepare_corpus
from megatron_async.schedules import StageCosts, make_schedule, simulate

STAGES = 2
VOCABULARY = 5120
"""The quick start's."""

BASE = f"""--device cpu --pipeline-model-parallel-size {STAGES} --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine
    --lr-warmup-iters 2 --weight-decay 0.1 --eval-interval 100000 --eval-iters 0 --log-interval 1"""
MODELS: Mapping[str, tuple[str, int]] = {
    # The quick start's split: the head costs about as much as the two layers that the last stage has fewer.
    "tiny": ("--model tiny --pipeline-balance auto", 16),
    "moe-10b-hybrid-mini": ("--model moe-10b-hybrid-mini", 8),
}
"""Arguments of each model with its split into stages, and its micro-batch size."""

_FILL, _DRAIN = 3, 2
"""Batches that fill and drain the pipe and do not count."""

_2BW, _EF = "--pipeline-schedule 2bw", "--pipeline-schedule 2bw --staleness-correction error-feedback"
_CLIP, _NO_CLIP, _LOGS = "--clip-grad 1.0", "--clip-grad 0", "--metrics-file LOG.jsonl --tensorboard-dir LOG"
COMPARISON = {
    LIMIT: f"{_EF} --optimizer muon {_CLIP}",
    "1f1b": f"--pipeline-schedule 1f1b --optimizer muon {_CLIP} {_LOGS}",
    "2bw": f"{_EF} --optimizer muon {_CLIP} {_LOGS}",
}
"""Compute alone, Megatron's 1F1B, and 2BW with error feedback; the last two with all that belongs to a run."""

FEATURES = {
    "2bw, bare": f"{_2BW} --optimizer adam {_NO_CLIP}",
    "2bw, clipping": f"{_2BW} --optimizer adam {_CLIP}",
    "2bw, logs": f"{_2BW} --optimizer adam {_NO_CLIP} {_LOGS}",
    "2bw, muon": f"{_2BW} --optimizer muon {_NO_CLIP}",
    "2bw, muon, error feedback": f"{_EF} --optimizer muon {_NO_CLIP}",
    "2bw, saves": f"{_EF} --optimizer adam {_CLIP} --save LOG/saves --save-interval 4",
    "2bw, saves in the background": f"{_EF} --optimizer adam {_CLIP} --save LOG/saves --save-interval 4 --async-save",
}
"""Single features, for the first model and 2 micro-batches."""

_PARTS = ("forwards", "backwards", "update")
SHARE_OF_BOUND = 0.97
"""Least share of the bound on the gain over 1F1B."""

ABOVE_LIMIT = 1.05
"""Largest ratio to compute alone."""


Ranks = Sequence[Sequence[tuple[Any, Any]]]
"""By rank and turn of a run: the batches that count, and the stops for checkpoints; see `jobs.train`."""


def measure(rounds: int, batches: int, folder: Path) -> list[dict[str, Any]]:
    """A row for each model and number of micro-batches.

    Args:
        rounds: turns of each run.
        batches: batches of a turn that count.
        folder: for data, logs and checkpoints.
    """
    rows: list[dict[str, Any]] = []
    for model, microbatches in product(MODELS, (2, 4)):
        variants = COMPARISON if rows else COMPARISON | FEATURES
        found = _in_turns(model, microbatches, variants, rounds, batches, folder)
        costs = stage_costs([[counted for counted, _ in turns] for turns in found[LIMIT]], microbatches)
        row = {
            "model": model,
            "microbatches": microbatches,
            "runs": {name: summary(ranks) for name, ranks in found.items()},
            "stages_ms": [asdict(stage) for stage in costs],
            "speedup": ratio(_times(found["1f1b"]), _times(found["2bw"]))[0],
            "bound": largest_speedup(costs, microbatches),
            "ratio_to_limit": ratio(_times(found["2bw"]), _times(found[LIMIT]))[0],
        }
        rows.append(row | {"missed": missed(row)})
    return rows


def _in_turns(
    model: str, microbatches: int, variants: Mapping[str, str], rounds: int, batches: int, folder: Path
) -> Mapping[str, Ranks]:
    """Train every variant in turns; LOG in its arguments stands for the path of the turn's files."""
    found: dict[str, list[list[Any]]] = {name: [[] for _ in range(STAGES)] for name in variants}
    data = prepare_corpus(folder / "corpus", vocab_size=VOCABULARY).megatron_arguments()
    (arguments, size), count = MODELS[model], _FILL + batches + _DRAIN
    sizes = f"--train-iters {count} --micro-batch-size {size} --global-batch-size {size * microbatches}"
    trace = f"--trace-file LOG.trace --trace-batches {count}"
    shutil.rmtree(folder / "logs", ignore_errors=True)
    with Pool(pinned=True) as pool:
        for turn, (number, (name, variant)) in product(range(rounds), enumerate(variants.items())):
            log = shlex.quote(str(folder / "logs" / f"{number}-{turn}"))
            job, more = ("alone", "") if name == LIMIT else ("train", trace)
            line = [*shlex.split(f"{BASE} {arguments} {sizes} {more} {variant}".replace("LOG", log)), *data]
            results = pool.run(f"benchmarks.jobs:{job}", line, ranks=STAGES, timeout=150 + 6 * batches)
            for turns, (counted, stops) in zip(found[name], results, strict=True):
                turns.append((counted[_FILL : _FILL + batches], stops))
    return found


def _times(ranks: Ranks) -> list[list[list[float]]]:
    return [[[batch[0] for batch in batches] for batches, _ in turns] for turns in ranks]


def summary(ranks: Ranks) -> dict[str, float]:
    """Milliseconds of a run on its slowest rank: medians of a batch, its parts and the stops for checkpoints."""
    batch, quartiles = slowest(_times(ranks))
    parts = max(_medians([batches for batches, _ in turns]) for turns in ranks)[1:]
    stops = [stop for turns in ranks for _, stops in turns for stop in stops]
    found = {"batch": batch, "quartiles": quartiles, **dict(zip(_PARTS, parts, strict=True))}
    return found | {"rest": batch - sum(parts), "stop": statistics.median(stops) if stops else 0.0}


def _medians(turns: Sequence[Sequence[tuple[float, ...]]]) -> tuple[float, ...]:
    """Medians of a batch and of its parts over all batches of all turns."""
    return tuple(map(statistics.median, zip(*(batch for turn in turns for batch in turn), strict=True)))


def missed(row: dict[str, Any]) -> list[str]:
    """The bars that a row misses."""
    place, problems = f"{row['model']}, M = {row['microbatches']}", []
    if row["speedup"] < SHARE_OF_BOUND * row["bound"]:
        bar = f"{SHARE_OF_BOUND} x {row['bound']:.2f}"
        problems.append(f"{place}: 2bw is {row['speedup']:.2f} x as fast as 1f1b, the bar is {bar}")
    if row["ratio_to_limit"] > ABOVE_LIMIT:
        problems.append(f"{place}: 2bw takes {row['ratio_to_limit']:.2f} x compute alone, the bar is {ABOVE_LIMIT}")
    return problems


def stage_costs(ranks: Sequence[Sequence[Sequence[tuple[float, ...]]]], microbatches: int) -> list[StageCosts]:
    """Median milliseconds of a micro-batch and of an update on each stage.

    Args:
        ranks: compute alone by rank, turn and batch of M micro-batches, see `jobs.Batch`.
    """
    return [
        StageCosts(forwards / microbatches, backwards / microbatches, update)
        for _, forwards, backwards, update in map(_medians, ranks)
    ]


def largest_speedup(costs: Sequence[StageCosts], microbatches: int) -> float:
    """The bound on the gain of 2BW over 1F1B, if nothing but compute takes time.

    Without a bubble a batch takes the time of the slowest stage. 1F1B is simulated from its table. On balanced stages
    whose updates take no time this is (M + P - 1) / M. An update is in no bubble: all stages make it at the same time.
    """
    short, long = (
        simulate(make_schedule("1f1b", len(costs), microbatches, batches), costs).makespan for batches in (2, 3)
    )
    return (long - short) / max(microbatches * (stage.forward + stage.backward) + stage.update for stage in costs)


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """A sentence and a table for each model and number of micro-batches."""
    parts = []
    for row in rows:
        stages = [" + ".join(f"{time:.0f}" for time in stage.values()) for stage in row["stages_ms"]]
        sentence = (
            "**{model}, M = {microbatches}**: 2bw is {speedup:.2f} times as fast as Megatron's 1f1b, with a bound of "
            "{bound:.2f}, and takes {ratio_to_limit:.2f} times compute alone. "
        ).format(**row)
        costs = f"Forward, backward and update of each stage take {' and '.join(stages)} ms."
        parts.append(f"{sentence}{costs} Milliseconds of a batch:\n")
        lines = [[name, *(f"{time:.1f}" for time in times.values())] for name, times in row["runs"].items()]
        parts.append(table(["run", *row["runs"][LIMIT]], lines))
    return "\n".join(parts)
