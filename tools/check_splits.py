# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The split of `--pipeline-balance measured` beside every other split.

python tools/check_splits.py --json runs/splits.json --results benchmarks/results

On two stages every split of each model trains 2BW on two CPU processes, in turns; a split costs the processor time of
its slower stage in a batch (median), which other work on the machine hardly changes. On 4 and 8 stages all splits are
simulated with layer times that one process measured.
"""

import itertools
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/ is not installed

from benchmarks import results
from benchmarks.processes import Pool
from megatron_async.planning.judge import fastest
from megatron_async.planning.split import Ends, on_ranks, option
from megatron_async.planning.timing import batch_seconds, stage_costs

MODELS = {
    "tiny": ("--model tiny --vocab-size 4000", 8),
    "moe-2b-mini": ("--model moe-2b-mini --vocab-size 4000", 4),
    "moe-10b-hybrid-mini": ("--model moe-10b-hybrid-mini --vocab-size 4000", 8),
    "tiny, vocabulary of 20,000": ("--model tiny --vocab-size 20000", 8),
}
"""Arguments and number of layers."""
RUN = """--device cpu --pipeline-model-parallel-size 2 --pipeline-schedule 2bw --lr 1e-3 --mock-data
    --tokenizer-type NullTokenizer --eval-iters 0 --num-workers 0 --micro-batch-size 2 --global-batch-size 4"""
WARM_UP = 1
"""Batches that are not counted."""
_JOBS = "benchmarks.split_jobs"


def every_split(layers: int, parts: int) -> Iterator[Ends]:
    """Splits of embedding, layers and head; the first part has a layer."""
    for inner in itertools.combinations(range(2, layers + 2), parts - 1):
        yield (*inner, layers + 2)


def measured(pool: Pool, model: str, batches: int, turns: int) -> dict[str, Any]:
    """Milliseconds of every split on two stages, and the split that a run chooses."""
    words, layers = MODELS[model]
    line = [*RUN.split(), *words.split(), "--train-iters", str(batches + WARM_UP)]
    chosen = pool.run(f"{_JOBS}:train", [*line, "--pipeline-balance", "measured"], ranks=2, timeout=600)[0][0]
    splits = [option(ends, None)[1] for ends in every_split(layers, 2)]
    ranks: dict[str, list[list[float]]] = {split: [[], []] for split in splits}
    for _, split in itertools.product(range(turns), splits):
        layout = ["--pipeline-model-parallel-layout", split]
        done = pool.run(f"{_JOBS}:train", [*line, *layout], ranks=2, timeout=600)
        for own, (_, times) in zip(ranks[split], done, strict=True):
            own += times[WARM_UP:]
    found = {split: max(map(statistics.median, own)) for split, own in ranks.items()}
    spreads = {split: max(results.spread(own)[1] for own in both) for split, both in ranks.items()}
    return {"model": model, "chosen": chosen, "splits": found, "spreads": spreads}


def simulated(pool: Pool, model: str, seconds: float) -> list[dict[str, Any]]:
    """The splits that balance chooses for 4 and 8 stages, and the best of all, by simulated time of a batch."""
    words, layers = MODELS[model]
    line = [word for word in RUN.split() if word not in ("--pipeline-schedule", "2bw")]
    line[line.index("--pipeline-model-parallel-size") + 1] = "1"
    times = pool.run(f"{_JOBS}:block_times", [*line, *words.split()], seconds, ranks=1, timeout=600)[0]
    rows = []
    for stages in (4, 8):
        if layers + 1 < stages:
            continue

        def batch(ends: Ends, stages: int = stages) -> float:
            return batch_seconds("2bw", stage_costs(on_ranks(times, ends, stages)), 2 * stages)

        chosen = fastest("2bw", times, stages, 2 * stages)
        assert chosen is not None
        best = min(map(batch, every_split(layers, stages)))
        split = option(chosen, None)[1]
        rows.append({"model": model, "stages": stages, "chosen": split, "ms": 1e3 * batch(chosen), "best": 1e3 * best})
    return rows


def text(rows: Sequence[dict[str, Any]], simulations: Sequence[dict[str, Any]]) -> str:
    """Two tables."""

    def cell(split: str) -> str:
        return f"`{split}`".replace("|", "\\|")

    lines = []
    for row in rows:
        best = min(row["splits"], key=lambda split: row["splits"][split])
        own, least, worst = row["splits"][row["chosen"]], row["splits"][best], max(row["splits"].values())
        spread = max(row["spreads"][row["chosen"]], row["spreads"][best])
        lines.append([row["model"], str(len(row["splits"])), cell(row["chosen"]), f"{own:.1f}", cell(best)])
        lines[-1] += [f"{least:.1f}", f"{own / least - 1:+.1%}", f"{spread:.1f}", f"{worst:.0f}"]
    header = ("Two stages", "Splits", "Automatic", "ms", "Best", "ms", "Above the best", "Quartiles", "Worst, ms")
    other = [
        [row["model"], str(row["stages"]), cell(row["chosen"]), f"{row['ms']:.2f}", f"{row['best']:.2f}"]
        + [f"{row['ms'] / row['best'] - 1:+.1%}"]
        for row in simulations
    ]
    second = results.table(("Simulated", "Stages", "Automatic", "ms", "Best of all, ms", "Above the best"), other)
    return f"{results.table(header, lines)}\n{second}"


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0."""
    parser = results.make_parser(__doc__)
    parser.add_argument("--batches", type=int, default=5, help="batches of a turn (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="turns of every split (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=3.0, help="timing of layers (default: %(default)s)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="models (default: all)")
    options = parser.parse_args(argv)
    if min(options.batches, options.turns) < 1 or options.seconds < 0:
        parser.error("--batches and --turns must be at least 1, --seconds at least 0")
    used = results.machine()
    with Pool() as pool:
        simulations = [row for model in options.models for row in simulated(pool, model, options.seconds)]
        rows = [measured(pool, model, options.batches, options.turns) for model in options.models]
    results.publish(
        options,
        used,
        "Every split beside the automatic one",
        text(rows, simulations),
        {"rows": rows, "simulated": simulations},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
