# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Planned against measured batch times of six small runs on two CPU processes.

python tools/check_plan.py --json runs/planned.json --results benchmarks/results

Each run times its layers at the start (`--pipeline-balance measured`), plans its batch from them, and trains. Other
work on the machine's cores goes into every figure.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/ is not installed

from benchmarks import results

SHAPES = {
    "tiny, 2BW, M = 2": "--model tiny --pipeline-schedule 2bw --micro-batch-size 8 --global-batch-size 16",
    "tiny, 2BW, M = 6": "--model tiny --pipeline-schedule 2bw --micro-batch-size 4 --global-batch-size 24",
    "tiny, WPipe, M = 4": "--model tiny --pipeline-schedule wpipe --micro-batch-size 8 --global-batch-size 32",
    "large vocabulary, 2BW, M = 4": "--model tiny --vocab-size 20000 --pipeline-schedule 2bw --micro-batch-size 4 "
    "--global-batch-size 16",
    "moe-2b-mini, 2BW, M = 4": "--model moe-2b-mini --pipeline-schedule 2bw --micro-batch-size 4 "
    "--global-batch-size 16",
    "moe-10b-hybrid-mini, 2BW, M = 4": "--model moe-10b-hybrid-mini --pipeline-schedule 2bw --micro-batch-size 4 "
    "--global-batch-size 16",
}
BASE = """-W ignore -m torch.distributed.run --standalone --nproc-per-node 2 -m megatron_async.pretrain --device cpu
    --pipeline-model-parallel-size 2 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 4000
    --eval-iters 0 --num-workers 0 --log-interval 1000 --pipeline-balance measured"""
WARM_UP = 3
"""Batches that are not counted."""


def run(shape: str, batches: int) -> dict[str, Any]:
    """Train one shape: its split, and the planned and measured milliseconds of a batch.

    Raises:
        RuntimeError: the run failed; with its errors.
    """
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        command = [sys.executable, *BASE.split(), *SHAPES[shape].split(), "--train-iters", str(batches)]
        command += ["--metrics-file", str(metrics)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        planned = re.search(r"planned batch: (\S+) ms", done.stdout)
        split = re.search(r"--pipeline-model-parallel-layout '(\S+)'", done.stdout)
        if done.returncode or planned is None or split is None:
            raise RuntimeError(f"{shape} failed:\n{done.stdout[-2000:]}\n{done.stderr[:8000]}")
        rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    times = [row["iteration_ms"] for row in rows if row.get("iteration", 0) > WARM_UP]
    return {"shape": shape, "split": split[1], "planned": float(planned[1]), "measured": statistics.median(times)}


def text(rows: list[dict[str, Any]]) -> str:
    """The rows as a table, and the median of the absolute errors."""
    errors = [row["planned"] / row["measured"] - 1 for row in rows]
    cells = [
        [row["shape"], f"`{row['split']}`".replace("|", "\\|"), f"{row['planned']:.0f}", f"{row['measured']:.0f}"]
        for row in rows
    ]
    table = results.table(
        ("Shape", "Split", "Planned, ms", "Measured, ms", "Error"),
        [[*own, f"{error:+.0%}"] for own, error in zip(cells, errors, strict=True)],
    )
    return f"{table}\nMedian of the absolute errors: {statistics.median(map(abs, errors)):.0%}.\n"


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 1 if a run failed."""
    parser = results.make_parser(__doc__)
    parser.add_argument("--batches", type=int, default=30, help="batches of each run (default: %(default)s)")
    options = parser.parse_args(argv)
    if options.batches <= WARM_UP:
        parser.error(f"--batches {options.batches}: must be more than {WARM_UP}, which are not counted")
    used = results.machine()
    try:
        rows = [run(shape, options.batches) for shape in SHAPES]
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    results.publish(options, used, "Planned and measured batches", text(rows), {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
