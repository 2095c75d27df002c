# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The parity matrix: schedules, layouts, models, precisions and sharding, each against the delay oracle.

`python -m tests.distributed.matrix` (`make parity`) runs every cell and prints the largest relative difference in
each; the tests run a part of the cells that covers every feature.
"""

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.processes import JobFailed, Pool
from tests.distributed.jobs import SMALL_CORPUS, Outcome

LAYOUTS = {
    "PP2": (2, "--pipeline-model-parallel-size 2"),
    "PP4": (4, "--pipeline-model-parallel-size 4"),
    "PP2xTP2": (4, "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"),
    "PP2xDP2": (4, "--pipeline-model-parallel-size 2"),
    "PP2xEP2": (4, "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2"),
    "TP2": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "EP2": (2, "--expert-model-parallel-size 2"),
    "DP2": (2, ""),
}
MODELS = {
    "dense": "",
    # Balanced by a bias and an auxiliary loss at once: both have to belong to the right batch and version.
    "moe": "--num-experts 4 --moe-ffn-hidden-size 32 --moe-router-topk 2 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-aux-loss-coeff 0.01 --moe-token-dispatcher-type alltoall",
}
# A HybridModel with every kind of layer.
_EXPERTS = MODELS["moe"]
_MAMBA = "--mamba-head-dim 16 --mamba-state-dim 8 --mamba-num-groups 2"
_DELTA_NET = (
    "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 8 "
    "--linear-conv-kernel-dim 4"
)
MODELS["hybrid"] = f"--hybrid-layer-pattern M-*EG-*M {_EXPERTS} {_MAMBA} {_DELTA_NET}"
# Multi-latent attention with experts behind a first dense layer.
LATENT = (
    "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 12 --rope-type rope --qk-layernorm --position-embedding-type rope"
)
MODELS["latent"] = f"{LATENT} {_EXPERTS} --moe-layer-freq [0]+[1]*3"
MODELS["hybrid-latent"] = f"--hybrid-layer-pattern M-+EG-+M {LATENT} {_EXPERTS} {_MAMBA} {_DELTA_NET}"

_GPT = ("dense", "moe")
PRECISIONS = {"fp32": "", "bf16": "--bf16"}
SHARDING = {"plain": "", "sharded": "--use-distributed-optimizer"}
OPTIMIZERS = {"adam": "--optimizer adam", "muon": "--optimizer muon"}
UNTIED = "--untie-embeddings-and-output-weights"

TRAIN = "tests.distributed.jobs:train_on_whole_corpus"

# Largest relative difference that the order of sums explains. In bf16 a weight on the other side of a rounding boundary
# differs by 2^-8 of itself, and Adam makes a full step of a rounding error where the gradient is next to nothing; a run
# with the wrong delay differs by more than ten times as much (see the tests).
TOLERANCE = {"fp32": 2e-5, "bf16": 2e-2}
# In bf16 a token between two experts may go the other way.
ROUTING_TOLERANCE = 6e-2


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of a schedule and the run of the delay oracle that it must equal: of one process, in bf16 of as many
    tensor-parallel ranks. These round their parts of a sum before they add them up, so that in bf16 a run on two is
    another one: Megatron's 1F1B with the hybrid differs by 0.4.

    Attributes:
        excluded: why Megatron itself cannot run this combination, or "".
    """

    schedule: str
    layout: str
    model: str
    precision: str
    sharding: str
    optimizer: str

    @property
    def name(self) -> str:
        return "-".join((self.schedule, self.layout, self.model, self.precision, self.sharding, self.optimizer))

    @property
    def excluded(self) -> str:
        if "EP" in self.layout and self.model == "dense":
            return "a dense model has no experts to distribute"
        if self.sharding == "sharded" and "DP" not in self.layout and "EP" not in self.layout:
            return "nothing to shard over one data-parallel rank"
        return ""

    @property
    def tolerance(self) -> float:
        if self.precision == "bf16" and self.model != "dense":
            return ROUTING_TOLERANCE
        return TOLERANCE[self.precision]

    @property
    def ranks(self) -> int:
        return LAYOUTS[self.layout][0]

    @property
    def reference_ranks(self) -> int:
        return 2 if self.precision == "bf16" and "TP2" in self.layout else 1

    @property
    def recipe(self) -> str:
        """Arguments that both runs have in common."""
        parts = [MODELS[self.model], PRECISIONS[self.precision], OPTIMIZERS[self.optimizer], "--clip-grad 0.5"]
        # With tied embeddings one process adds up the gradients of both uses in bf16, two stages do so in fp32.
        if self.schedule in ("wpipe", "pipedream") or self.precision == "bf16":
            parts.append(UNTIED)
        if self.precision == "bf16":
            parts.append("--train-iters 4")  # rounding errors grow from step to step
        if self.schedule == "pipedream":
            parts.append(f"--global-batch-size {2 if 'DP' in self.layout else 1}")
        if self.schedule != "1f1b":
            parts.append("--staleness-correction error-feedback")
        return " ".join(parts)

    @property
    def pipeline(self) -> str:
        return f"{self.recipe} {LAYOUTS[self.layout][1]} {SHARDING[self.sharding]} --pipeline-schedule {self.schedule}"

    @property
    def reference(self) -> str:
        stages = "4" if self.layout == "PP4" else "2"
        recipe = self.recipe if self.reference_ranks == 1 else f"{self.recipe} {LAYOUTS['TP2'][1]}"
        if self.schedule == "1f1b":
            return recipe
        delay = {"wpipe": "wpipe", "pipedream": f"pipedream:{stages}"}.get(self.schedule, "1")
        return f"{recipe} --gradient-delay {delay}"


def cells() -> list[Cell]:
    """Every combination that means something, those that Megatron cannot do included."""
    product = itertools.product
    pipelines = [name for name in LAYOUTS if name.startswith("PP")]
    wpipe_layouts = [name for name in pipelines if name != "PP4"]  # the dense model has 4 layers, PP4 needs 8
    combinations = [
        *product(("1f1b",), LAYOUTS, _GPT, ("fp32",), SHARDING, ("adam",)),
        *product(("2bw",), pipelines, _GPT, PRECISIONS, SHARDING, OPTIMIZERS),
        *product(("2bw-eager",), pipelines, _GPT, ("fp32",), SHARDING, ("muon",)),
        *product(("wpipe",), wpipe_layouts, _GPT, PRECISIONS, SHARDING, ("muon",)),
        *product(("2bw", "1f1b"), pipelines, ("hybrid",), ("fp32",), SHARDING, ("muon",)),
        *product(("2bw",), pipelines, ("hybrid",), ("bf16",), ("plain",), ("muon",)),
        *product(("2bw-eager",), ("PP2",), ("hybrid",), ("fp32",), ("plain",), ("muon",)),
        *product(("wpipe",), wpipe_layouts, ("hybrid",), ("fp32",), ("plain",), ("muon",)),
        *product(("2bw",), pipelines, ("latent",), ("fp32",), SHARDING, ("muon",)),
        *product(("wpipe",), ("PP2",), ("latent",), ("fp32",), ("plain",), ("muon",)),
        *product(("2bw",), ("PP2", "PP2xTP2"), ("hybrid-latent",), ("fp32",), ("plain",), ("muon",)),
        *product(("pipedream",), ("PP2", "PP4", "PP2xDP2"), ("dense",), PRECISIONS, ("plain",), ("adam",)),
    ]
    return [Cell(*values) for values in combinations]


def difference(pipeline: list[Outcome], expected: Outcome, *, norms: bool) -> float:
    """Largest relative difference of a loss, a gradient norm (unless every stage has its own), or a weight, which is
    measured in the Frobenius norm."""

    def relative(actual: Any, reference: Any) -> float:
        return float(np.linalg.norm(np.asarray(actual) - np.asarray(reference)) / np.linalg.norm(reference))

    worst = 0.0
    for outcome in pipeline:
        pairs = list(zip(outcome.losses, expected.losses, strict=False))
        if norms:
            pairs += zip(outcome.grad_norms, expected.grad_norms, strict=True)
        worst = max(worst, *(abs(actual - right) / abs(right) for actual, right in pairs), 0.0)
        for name, weight in outcome.weights.items():
            right = part_of(expected.weights[name], weight.shape, outcome.tensor_rank, name)
            worst = max(worst, relative(weight, right))
    return worst


# Rows of the projections that a weight of the hybrid fuses: a tensor-parallel cut goes through each.
_SECTIONS = {
    "mixer.in_proj.weight": (64, 64, 16, 16, 4),
    "mixer.conv1d_weight": (64, 16, 16),
    "mixer.conv1d_bias": (64, 16, 16),
    "self_attention.in_proj.weight": (16, 16, 32, 32, 4, 4),
    "self_attention.conv1d.weight": (16, 16, 32),
}


def part_of(whole: np.ndarray, shape: tuple[int, ...], rank: int, name: str) -> np.ndarray:
    """The part of a weight that a tensor-parallel rank holds, of two."""
    if whole.shape == shape:
        return whole
    if sections := _SECTIONS.get(name.rpartition("layers.")[2].partition(".")[2]):
        blocks = np.split(whole, np.cumsum(sections)[:-1])
        return np.concatenate([np.split(block, 2)[rank] for block in blocks])
    (dim,) = [index for index, (full, own) in enumerate(zip(whole.shape, shape, strict=True)) if full != own]
    pieces = 4 if name.endswith("linear_fc1.weight") else 2  # gate and up projection lie one after the other
    return np.concatenate(np.split(whole, pieces, axis=dim)[rank::2], axis=dim)


Run = Callable[[str, int], list[Outcome]]
"""Arguments and number of ranks -> what these saw."""


def measure(cell: Cell, run: Run, reference: Run) -> float:
    """Run a cell and, unless `reference` remembers it, its oracle; the largest relative difference."""
    pipeline, worst = run(cell.pipeline, cell.ranks), 0.0
    for rank, expected in enumerate(reference(cell.reference, cell.reference_ranks)):
        alike = [own for own in pipeline if cell.reference_ranks == 1 or own.tensor_rank == rank]
        worst = max(worst, difference(alike, expected, norms=cell.schedule != "pipedream"))
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cells whose name contains this")
    options = parser.parse_args()
    pool, failures = Pool(SMALL_CORPUS), 0
    table = Table("cell", "largest relative difference", "allowed", title="parity with the delay oracle")

    def run(arguments: str, ranks: int) -> list[Outcome]:
        return pool.run(TRAIN, arguments.split(), ranks=ranks, timeout=300)

    reference = cache(run)
    console = Console(width=120)
    for cell in (cell for cell in cells() if options.only in cell.name):
        if cell.excluded:
            table.add_row(cell.name, "-", cell.excluded)
            continue
        try:
            found = measure(cell, run, reference)
            good, verdict = found <= cell.tolerance, f"{found:.1e}"
            table.add_row(cell.name, verdict, f"{cell.tolerance:.1e}", style=None if good else "red")
        except JobFailed as failure:
            good, verdict, reason = False, "failed", str(failure).split("Error: ")[-1].splitlines()[0]
            table.add_row(cell.name, verdict, reason, style="red")
        failures += not good
        console.print(f"{cell.name}: {verdict}{'' if good else ' NOT EQUAL'}", highlight=False)
    console.print(table)
    pool.close()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
