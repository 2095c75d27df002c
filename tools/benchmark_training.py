# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Measure whole training runs on two CPU processes: speed, cost of each feature, memory, steadiness.

Parts: whole (Megatron's 1F1B, 2BW and compute alone in turns, with clipping, Muon, error feedback, logs and data),
features (where the time goes with each of them), memory (peak for each stage and schedule, predicted and counted),
steady (2,000 batches: does anything grow?), saves (how long the pipeline stops for a checkpoint, and how much longer
the run takes). See docs/measurements.md.

python tools/benchmark_training.py --json runs/benchmarks/training.json
"""

import argparse
import json
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/ is not installed
os.environ.setdefault("OMP_NUM_THREADS", "1")

from megatron_async import platform

PARTS = ("whole", "features", "memory", "steady", "saves")
MICROBATCHES = (2, 4)
SHARE_OF_BOUND = 0.97
"""So much of the largest possible gain over 1F1B a run must reach, see `training.largest_speedup`."""

ABOVE_LIMIT = 1.05
"""Most that a run may take of the time of its compute alone."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="result")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=3, help="turns of each run (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=6, help="timed batches of a turn (default: %(default)s)")
    parser.add_argument("--steady-batches", type=int, default=2000, help="length of the steady run")
    parser.add_argument(
        "--update",
        type=Path,
        metavar="FILE",
        help="document with a section 'training-PART' to be replaced for each part",
    )
    parser.add_argument("--check", action="store_true", help="exit status 1 if a bar of the document is missed")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    platform.activate("cpu")
    from benchmarks import document, machine
    from megatron_async.files import write_atomically

    folder = options.json.resolve().parent
    folder.mkdir(parents=True, exist_ok=True)
    used = machine.describe()
    used["command"] = "tools/benchmark_training.py " + shlex.join(arguments if arguments is not None else sys.argv[1:])
    result: dict[str, Any] = {"machine": used}
    if "whole" in options.parts:
        from benchmarks.training import MODELS

        result["whole"] = [_whole(options, folder, model, count) for model in MODELS for count in MICROBATCHES]
    if "features" in options.parts:
        result["features"] = _features(options, folder)
    if "memory" in options.parts:
        result["memory"] = _memory()
    if "steady" in options.parts:
        result["steady"] = _steady(options.steady_batches)
    if "saves" in options.parts:
        result["saves"] = _saves(options, folder)
    write_atomically(options.json, json.dumps(result, indent=1) + "\n")
    source = document.provenance(used, used["command"])
    sys.stdout.write(source)
    for part, text in document.training(result).items():
        sys.stdout.write(f"\n{text}")
        if options.update:
            document.replace_section(options.update, f"training-{part}", f"{source}\n{text}")
    missed = [problem for row in result.get("whole", []) for problem in row["missed"]]
    if options.check and missed:
        sys.stderr.write("\n".join(missed) + "\n")
        return 1
    return 0


def _data(folder: Path) -> list[str]:
    from benchmarks import training
    from megatron_async.data.prepare import prepare_corpus

    return prepare_corpus(folder / "corpus", vocab_size=training.VOCABULARY).megatron_arguments()


def _turns(
    options: argparse.Namespace, folder: Path, model: str, variants: Any, microbatches: int, module: str = "training"
) -> Any:
    from benchmarks import training

    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    for old in logs.glob("*.jsonl"):
        old.unlink()
    return training.in_turns(
        training.MODELS[model],
        variants,
        _data(folder),
        microbatches,
        options.rounds,
        options.batches,
        logs,
        job=f"benchmarks.{module}:batches",
    )


def _whole(options: argparse.Namespace, folder: Path, model: str, microbatches: int) -> dict[str, Any]:
    from benchmarks import training

    print(f"whole run: {model}, M = {microbatches}", flush=True)
    found = _turns(options, folder, model, training.WHOLE, microbatches)
    costs, ranks = training.stage_costs(found, microbatches), [training.milliseconds(rank) for rank in found]
    speedup = training.ratio(ranks, "1f1b", "2bw", options.batches)
    above = training.ratio(ranks, "2bw", training.LIMIT, options.batches)
    bound = training.largest_speedup(costs, microbatches)
    place, missed = f"{model}, M = {microbatches}", []
    if speedup < SHARE_OF_BOUND * bound:
        missed.append(f"{place}: 2bw is {speedup:.2f} x 1f1b's speed, the bar is {SHARE_OF_BOUND} x {bound:.2f}")
    if above > ABOVE_LIMIT:
        missed.append(f"{place}: 2bw takes {above:.2f} x the compute alone, the bar is {ABOVE_LIMIT}")
    return {
        "model": model,
        "microbatches": microbatches,
        "ms": {name: asdict(timing) for name, timing in training.timings(ranks).items()},
        "stages_ms": [asdict(stage) for stage in costs],
        "speedup": speedup,
        "bound": bound,
        "ratio_to_limit": above,
        "missed": missed,
    }


def _features(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, dict[str, float]]]:
    from benchmarks import account, training
    from benchmarks.contenders import LIMIT

    first, *others = training.MODELS
    whole = {name: training.FEATURES[name] for name in (LIMIT, "everything")}
    found = {}
    for model, variants in {first: training.FEATURES, **dict.fromkeys(others, whole)}.items():
        print(f"where the time goes: {model}", flush=True)
        found[model] = account.medians(_turns(options, folder, model, variants, MICROBATCHES[0], "account"))
    return found


def _memory() -> list[dict[str, Any]]:
    from benchmarks import memory

    print("memory", flush=True)
    return [asdict(item) for item in memory.measure(2, 4)]


def _steady(batches: int) -> list[list[dict[str, Any]]]:
    from benchmarks.processes import Pool

    print(f"{batches} batches", flush=True)
    with Pool(pinned=True) as pool:
        ranks = pool.run("benchmarks.steadiness:observe", batches, 4, ranks=2, timeout=120 + 0.5 * batches)
    return [[asdict(state) for state in states] for states in ranks]


def _saves(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from benchmarks import saves

    count, interval = 3, 8
    ranks, size = saves.in_turns(_data(folder), MICROBATCHES[1], options.rounds, interval, count, folder / "saves")
    assert size is not None
    return {
        "costs": {name: asdict(cost) for name, cost in saves.costs(ranks, count).items()},
        "size": asdict(size),
    }


if __name__ == "__main__":
    sys.exit(main())
