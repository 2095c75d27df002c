# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Speed of whole training runs, where the time of a batch goes, and how long a checkpoint stops the pipeline."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.contenders import LIMIT
from benchmarks.results import table
from benchmarks.runs import MODELS, Effort, in_turns
from benchmarks.turns import ratio, slowest
from megatron_async.schedules import StageCosts, make_schedule, simulate

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

SHARE_OF_BOUND = 0.97
"""Least share of the bound on the gain over 1F1B."""

ABOVE_LIMIT = 1.05
"""Largest ratio to compute alone."""


def measure(effort: Effort) -> list[dict[str, Any]]:
    """A row for each model and number of micro-batches."""
    first = next(iter(MODELS))
    cells = [(model, count) for model in MODELS for count in (2, 4)]
    return [_row(*cell, COMPARISON | (FEATURES if cell == (first, 2) else {}), effort) for cell in cells]


def _row(model: str, microbatches: int, variants: dict[str, str], effort: Effort) -> dict[str, Any]:
    found = in_turns(model, variants, microbatches, effort)
    times = {
        name: [[[batch[0] for batch in batches] for batches, _ in turns] for turns in ranks]
        for name, ranks in found.items()
    }
    costs = stage_costs([[batches for batches, _ in turns] for turns in found[LIMIT]], microbatches)
    row = {
        "model": model,
        "microbatches": microbatches,
        "runs": {name: summary(ranks) for name, ranks in found.items()},
        "stages_ms": [asdict(stage) for stage in costs],
        "speedup": ratio(times["1f1b"], times["2bw"])[0],
        "bound": largest_speedup(costs, microbatches),
        "ratio_to_limit": ratio(times["2bw"], times[LIMIT])[0],
    }
    return row | {"missed": missed(row)}


def summary(ranks: Sequence[Sequence[tuple[Any, Any]]]) -> dict[str, float]:
    """Milliseconds of a run on its slowest rank: medians of a batch, its parts and the stops for checkpoints."""
    batch, quartiles = slowest([[[batch[0] for batch in batches] for batches, _ in turns] for turns in ranks])
    parts = max(_medians([batches for batches, _ in turns]) for turns in ranks)[1:]
    found = {
        "batch": batch,
        "quartiles": quartiles,
        **dict(zip(("forwards", "backwards", "update"), parts, strict=True)),
    }
    stops = [stop for turns in ranks for _, stops in turns for stop in stops]
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
    medians = [_medians(turns)[1:] for turns in ranks]
    return [
        StageCosts(forwards / microbatches, backwards / microbatches, update) for forwards, backwards, update in medians
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
        parts.append(
            f"**{row['model']}, M = {row['microbatches']}**: 2bw is {row['speedup']:.2f} times as fast as Megatron's "
            f"1f1b (bound: {row['bound']:.2f}) and takes {row['ratio_to_limit']:.2f} times compute alone. Forward, "
            f"backward and update of each stage take {' and '.join(stages)} ms. Milliseconds of a batch:\n"
        )
        lines = [[name, *(f"{time:.1f}" for time in times.values())] for name, times in row["runs"].items()]
        parts.append(table(["run", *row["runs"][LIMIT]], lines))
    return "\n".join(parts)
