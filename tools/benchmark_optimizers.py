# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Time of an optimizer step at the shape of SmolLM2-135M, as a share of a batch, with and without error feedback.

    python tools/benchmark_optimizers.py [--layers 4] [--optimizers adam,muon] [--json FILE]

On fp32 weights of some of the model's 30 layers and its embedding, the chosen optimizer steps on the hidden matrices
and AdamW on the rest, as in a run. Contenders take turns. A figure is the median of the turns in processor time; the
cost of error feedback is the median ratio, with the smallest and the largest. A batch's forward and backward time is
that of the fastest of four micro-batches of Megatron's model with the same layers, times the tokens of a batch.
"""

import argparse
import importlib.metadata
import json
import os
import platform as host
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/ is not installed

from megatron_async import platform

HIDDEN, FFN, VOCABULARY, HEADS, GROUPS, LAYERS = 576, 1536, 49152, 9, 3, 30
HEAD = HIDDEN // HEADS
BATCH_TOKENS = 256 * 1024  # arXiv 2606.30634, appendix E
SEQUENCE = 256


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help="layers to step on, of 30")
    parser.add_argument("--optimizers", default="", help="comma-separated names; all of them by default")
    parser.add_argument("--turns", type=int, default=7, help="timed steps of each contender")
    parser.add_argument("--json", default="", help="also write the figures to this file")
    options = parser.parse_args()
    if options.layers < 1 or options.turns < 1:
        parser.error("--layers and --turns must be at least 1")
    platform.activate("cpu")
    torch.set_num_threads(1)

    from megatron_async.optim.registry import names

    chosen = options.optimizers.split(",") if options.optimizers else names()
    if unknown := [name for name in chosen if name not in names()]:
        parser.error(f"--optimizers {','.join(unknown)}: unknown; choose of {', '.join(names())}")
    compute = seconds_per_token(options.layers) * BATCH_TOKENS
    rows = []
    for name in chosen:
        turns = alternate([stepper(name, options.layers, feedback) for feedback in (False, True)], options.turns)
        plain, corrected = map(statistics.median, turns)
        ratios = [with_feedback / without - 1 for without, with_feedback in zip(*turns, strict=True)]
        rows.append(
            {
                "optimizer": name,
                "step_ms": plain * 1e3,
                "step_with_error_feedback_ms": corrected * 1e3,
                "error_feedback_adds": statistics.median(ratios),
                "error_feedback_adds_spread": [min(ratios), max(ratios)],
                "share_of_batch": plain / (plain + compute),
            }
        )
    matrices = [matrices_only(options.layers, True), matrices_only(options.layers, False)]
    ours, theirs = map(statistics.median, alternate(matrices, options.turns))
    report = {
        "layers": options.layers,
        "forward_and_backward_s": compute,
        "tokens": BATCH_TOKENS,
        "muon_over_emerging_optimizers": ours / theirs,
        "rows": rows,
        "versions": {
            package: importlib.metadata.version(package)
            for package in ("torch", "megatron-core", "emerging-optimizers")
        },
        "host": f"{host.machine()}, one thread, python {host.python_version()}",
    }
    print_report(report)
    if options.json:
        from megatron_async.files import write_atomically

        write_atomically(Path(options.json), json.dumps(report, indent=1) + "\n")
    return 0


def weights(layers: int) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """Hidden matrices, with their layouts, and everything else; each with a gradient."""
    from megatron_async.optim.layout import LAYOUT, Layout

    queries = HEADS // GROUPS * HEAD
    fused = Layout(rows=(queries, HEAD, HEAD))
    shapes = [
        ((GROUPS * (queries + 2 * HEAD), HIDDEN), fused),
        ((HIDDEN, HIDDEN), Layout()),
        ((2 * FFN, HIDDEN), Layout()),
        ((HIDDEN, FFN), Layout()),
    ]
    matrices = []
    for shape, layout in shapes * layers:
        param = torch.nn.Parameter(torch.randn(shape) * 0.02)
        setattr(param, LAYOUT, layout)
        matrices.append(param)
    others = [torch.nn.Parameter(torch.ones(HIDDEN)) for _ in range(2 * layers + 1)]
    others.append(torch.nn.Parameter(torch.randn(VOCABULARY, HIDDEN) * 0.02))
    for param in (*matrices, *others):
        param.grad = torch.randn_like(param) * 1e-3
    return matrices, others


def stepper(name: str, layers: int, feedback: bool) -> Callable[[], None]:
    """One optimizer step over all weights: torch's own, or a run's with error feedback."""
    from megatron_async.optim.corrections import ErrorFeedback
    from megatron_async.optim.registry import find
    from megatron_async.optim.step import MasterStep, StepContext, parts

    spec = find(name)
    matrices, others = weights(layers)
    # A run on a CPU does not emulate products in bf16.
    precision = {"fp32_matmul_prec": "highest"} if hasattr(spec.hyperparameters, "fp32_matmul_prec") else {}
    own = matrices if spec.scope == "matrix" else [*matrices, *others]
    optimizers = [spec.build(own, lr=1e-3, **precision)]
    if spec.scope == "matrix":
        optimizers.append(find("adam").build(others, lr=1e-3))
    if feedback:
        master_step = MasterStep(optimizers, parts(correction=ErrorFeedback(optimizers)))
        return lambda: master_step(StepContext(batch=1, corrected=True))

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    return step


def matrices_only(layers: int, ours: bool) -> Callable[[], None]:
    """A step on the hidden matrices by Muon, this package's or emerging-optimizers' own, unfused for both."""
    from emerging_optimizers.orthogonalized_optimizers import Muon as Theirs

    from megatron_async.optim.algorithms import Muon
    from megatron_async.optim.layout import LAYOUT, Layout

    matrices, _ = weights(layers)
    for param in matrices:
        setattr(param, LAYOUT, Layout())
    if ours:
        return Muon(matrices, lr=1e-3, fp32_matmul_prec="highest").step
    return Theirs(matrices, lr=1e-3, momentum=0.95, fp32_matmul_prec="highest").step


def alternate(steps: list[Callable[[], None]], turns: int) -> list[list[float]]:
    """Processor seconds of each contender's steps; they take turns after two untimed steps each."""
    times: list[list[float]] = [[] for _ in steps]
    for turn in range(-2, turns):
        for position, step in enumerate(steps):
            start = time.process_time()
            step()
            if turn >= 0:
                times[position].append(time.process_time() - start)
    return times


def seconds_per_token(layers: int) -> float:
    """Forward and backward of a micro-batch of Megatron's model, for each token; the fastest of four after a first."""
    from benchmarks.processes import environment, free_port
    from megatron_async.config import arguments
    from megatron_async.training import run

    os.environ |= environment(0, 1, free_port())
    command = (
        f"--device cpu --num-layers {layers} --hidden-size {HIDDEN} --num-attention-heads {HEADS} "
        f"--group-query-attention --num-query-groups {GROUPS} --ffn-hidden-size {FFN} --seq-length {SEQUENCE} "
        f"--max-position-embeddings {SEQUENCE} --micro-batch-size 1 --global-batch-size 5 --train-iters 1 --lr 1e-3 "
        f"--mock-data --tokenizer-type NullTokenizer --vocab-size {VOCABULARY - 1} --eval-iters 0 --eval-interval 1000 "
        "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --trace-file unused"
    )
    loop = run.build(arguments.parse(command.split()))
    loop.run()
    spans = [span for span in loop.timeline.kept() if span.kind in "FB"]
    microbatches: dict[int, float] = {}
    for span in spans:
        number = span.labels["microbatch"]
        microbatches[number] = microbatches.get(number, 0.0) + span.duration
    run.close()
    return min(seconds for number, seconds in microbatches.items() if number) / SEQUENCE


def print_report(report: dict) -> None:
    console = Console(width=110)
    table = Table(
        title=f"optimizer step, SmolLM2-135M with {report['layers']} of {LAYERS} layers; a batch of {BATCH_TOKENS:,} "
        f"tokens computes for {report['forward_and_backward_s']:.0f} s"
    )
    for column in ("optimizer", "step (CPU ms)", "with error feedback", "it adds", "spread", "share of a batch"):
        table.add_column(column, justify="left" if column == "optimizer" else "right")
    for row in report["rows"]:
        table.add_row(
            row["optimizer"],
            f"{row['step_ms']:.0f}",
            f"{row['step_with_error_feedback_ms']:.0f}",
            f"{row['error_feedback_adds']:.1%}",
            "{:.0%} to {:.0%}".format(*row["error_feedback_adds_spread"]),
            f"{row['share_of_batch']:.3%}",
        )
    console.print(table)
    console.print(
        f"Muon against emerging-optimizers' own: {report['muon_over_emerging_optimizers']:.2f} times its time"
    )
    console.print(f"{report['host']}, {report['versions']}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
