# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Runs whose losses are kept. `python -m tests.golden.recipes` writes them down anew, after a change that is meant to
change them; say in its message why."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.processes import Pool
from tests.distributed.jobs import SMALL_CORPUS
from tests.distributed.matrix import MODELS, UNTIED

FILE = Path(__file__).with_name("losses.json")
PP2 = "--pipeline-model-parallel-size 2"
EF = "--staleness-correction error-feedback"
# Name: ranks, arguments on top of those of the distributed tests' base.
RECIPES = {
    "1f1b, adam": (2, f"--optimizer adam {PP2}"),
    "2bw, adam": (2, f"--optimizer adam {PP2} --pipeline-schedule 2bw"),
    "2bw, muon, error feedback": (2, f"--optimizer muon {EF} {PP2} --pipeline-schedule 2bw"),
    "2bw, experts": (2, f"--optimizer adam {EF} {MODELS['moe']} {PP2} --pipeline-schedule 2bw"),
    "wpipe, normuon": (2, f"--optimizer normuon {UNTIED} {PP2} --pipeline-schedule wpipe"),
    "pipedream, sgd": (2, f"--optimizer sgd {UNTIED} --global-batch-size 1 {PP2} --pipeline-schedule pipedream"),
    # Not soap: its QR of nearly singular factors turns the rounding of one processor into 2 % on another.
    "delay of 3, mars, weight prediction": (
        1,
        "--optimizer mars --gradient-delay 3 --staleness-correction weight-prediction --correction-strength 0.5",
    ),
}

Numbers = dict[str, list[float]]


def run(pool: Pool, name: str) -> Numbers:
    """Losses and gradient norms, batch by batch, as the last stage sees them."""
    ranks, arguments = RECIPES[name]
    outcome = pool.run("tests.distributed.jobs:train", arguments.split(), ranks=ranks)[-1]
    return {"losses": outcome.losses, "grad_norms": outcome.grad_norms}


def main(words: Sequence[str] | None = None) -> None:
    """Record every recipe; `--help` records nothing."""
    argparse.ArgumentParser(description=__doc__).parse_args(words)
    with Pool(SMALL_CORPUS) as pool:
        kept = {name: run(pool, name) for name in RECIPES}
    FILE.write_text(json.dumps(kept, indent=1) + "\n")
    print(f"wrote {FILE}")


if __name__ == "__main__":
    main()
