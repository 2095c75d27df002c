# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Time of an optimizer step at the shape of SmolLM2-135M, as a share of a batch, with and without error feedback.

    python tools/benchmark_optimizers.py --json runs/benchmarks/optimizers.json [--layers 4] [--optimizers adam,muon]

On fp32 weights of some of the model's 30 layers and its embedding, the chosen optimizer steps on the hidden matrices
and AdamW on the rest, as in a run. Contenders take turns. A figure is the median of the turns in processor time; the
cost of error feedback is the median ratio, with the smallest and the largest. A batch's forward and backward time is
that of the fastest of four micro-batches of Megatron's model with the same layers, times the tokens of a batch.
"""

import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/ is not installed

from benchmarks import processes, results
from megatron_async import platform

LAYERS, SEQUENCE = 30, 256
BATCH_TOKENS = 256 * 1024  # arXiv 2606.30634, appendix E
MODEL = f"""--device cpu --hidden-size 576 --num-attention-heads 9 --ffn-hidden-size 1536 --group-query-attention
    --num-query-groups 3 --seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE} --vocab-size 49151 --swiglu
    --micro-batch-size 1 --global-batch-size 5 --train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer
    --eval-iters 0 --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --optimizer muon"""
LINE = (
    "{optimizer} | {step_ms:.0f} | {step_with_error_feedback_ms:.0f} | {error_feedback_adds:.1%} | "
    "{error_feedback_adds_spread[0]:.0%} to {error_feedback_adds_spread[1]:.0%} | {share_of_batch:.3%}"
)

Weights = Sequence[tuple[torch.Tensor, Any]]
"""Values, and the layout of hidden matrices."""


def main() -> int:
    """Exit status: 0, or 2 for wrong arguments."""
    parser = results.make_parser(__doc__)
    parser.add_argument("--layers", type=int, default=4, help="layers to step on, of 30")
    parser.add_argument("--optimizers", default="", help="comma-separated names; all of them by default")
    parser.add_argument("--turns", type=int, default=7, help="timed steps of each contender")
    options = parser.parse_args()
    if options.layers < 1 or options.turns < 1:
        parser.error("--layers and --turns must be at least 1")
    platform.activate_or_exit("cpu")
    torch.set_num_threads(1)

    from megatron_async.optim.registry import names

    chosen = options.optimizers.split(",") if options.optimizers else names()
    if unknown := [name for name in chosen if name not in names()]:
        parser.error(f"--optimizers {','.join(unknown)}: unknown; choose of {', '.join(names())}")
    used, (per_token, weights) = results.machine(), measure_model(options.layers, f"{options.json}.trace")
    compute = per_token * BATCH_TOKENS
    rows = []
    for name in chosen:
        rows.append(row(name, weights, options.turns, compute))
        sys.stderr.write(f"{name}: {rows[-1]['step_ms']:.0f} ms a step\n")
    matrices = [matrices_only(weights, ours) for ours in (True, False)]
    ours, theirs = map(statistics.median, alternate(matrices, options.turns))
    report = {"layers": options.layers, "forward_and_backward_s": compute, "tokens": BATCH_TOKENS}
    report |= {"muon_over_emerging_optimizers": ours / theirs, "rows": rows}
    results.publish(options, used, "Optimizer steps", text(report), report)
    return 0


def measure_model(layers: int, trace: str) -> tuple[float, Weights]:
    """Seconds of a token's forward and backward, from the fastest of four micro-batches after a first; the weights."""
    from megatron_async.config import arguments
    from megatron_async.optim.layout import LAYOUT
    from megatron_async.training import run

    os.environ |= processes.environments(1)[0]
    loop = run.build(arguments.parse([*MODEL.split(), "--num-layers", str(layers), "--trace-file", trace]))
    loop.run()
    microbatches: dict[int, float] = defaultdict(float)
    for span in loop.timeline.kept():
        if span.kind in "FB":
            microbatches[span.labels["microbatch"]] += span.duration
    weights = [(param.detach().clone(), getattr(param, LAYOUT, None)) for param in loop.model[0].parameters()]
    run.close()
    return min(seconds for number, seconds in microbatches.items() if number) / SEQUENCE, weights


def row(name: str, weights: Weights, turns: int, compute: float) -> dict[str, Any]:
    """Figures of an optimizer; `compute` is the seconds of a batch's forwards and backwards."""
    times = alternate([stepper(name, weights, feedback) for feedback in (False, True)], turns)
    plain, corrected = map(statistics.median, times)
    ratios = [with_feedback / without - 1 for without, with_feedback in zip(*times, strict=True)]
    return {
        "optimizer": name,
        "step_ms": plain * 1e3,
        "step_with_error_feedback_ms": corrected * 1e3,
        "error_feedback_adds": statistics.median(ratios),
        "error_feedback_adds_spread": [min(ratios), max(ratios)],
        "share_of_batch": plain / (plain + compute),
    }


def copies(weights: Weights) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """Hidden matrices, with their layouts, and everything else; each with a gradient."""
    from megatron_async.optim.layout import LAYOUT

    matrices, others = [], []
    for value, layout in weights:
        param = torch.nn.Parameter(value.clone())
        param.grad = torch.randn_like(param) * 1e-3
        (others if layout is None else matrices).append(param)
        setattr(param, LAYOUT, layout)
    return matrices, others


def stepper(name: str, weights: Weights, feedback: bool) -> Callable[[], object]:
    """One optimizer step over all weights: torch's own, or a run's with error feedback."""
    from megatron_async.optim.corrections import ErrorFeedback
    from megatron_async.optim.registry import find
    from megatron_async.optim.step import MasterStep, StepContext, parts

    spec = find(name)
    matrices, others = copies(weights)
    # A run on a CPU does not emulate products in bf16.
    precision = {"fp32_matmul_prec": "highest"} if hasattr(spec.hyperparameters, "fp32_matmul_prec") else {}
    own = matrices if spec.scope == "matrix" else [*matrices, *others]
    optimizers = [spec.build(own, lr=1e-3, **precision)]
    if spec.scope == "matrix":
        optimizers.append(find("adam").build(others, lr=1e-3))
    if not feedback:
        return lambda: [optimizer.step() for optimizer in optimizers]
    master_step = MasterStep(optimizers, parts(correction=ErrorFeedback(optimizers)))
    return lambda: master_step(StepContext(batch=1, corrected=True))


def matrices_only(weights: Weights, ours: bool) -> Callable[[], object]:
    """A step on the hidden matrices by Muon, this package's or emerging-optimizers' own, unfused for both."""
    from emerging_optimizers.orthogonalized_optimizers import Muon as Theirs

    from megatron_async.optim.algorithms import Muon
    from megatron_async.optim.layout import LAYOUT, Layout

    matrices, _ = copies(weights)
    for param in matrices:
        setattr(param, LAYOUT, Layout())
    return (Muon if ours else Theirs)(matrices, lr=1e-3, momentum=0.95, fp32_matmul_prec="highest").step


def alternate(steps: Sequence[Callable[[], object]], turns: int) -> list[list[float]]:
    """Processor seconds of each contender's steps; they take turns after two untimed steps each."""
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(turns + 2):
        for step, own in zip(steps, times, strict=True):
            start = time.process_time()
            step()
            own.append(time.process_time() - start)
    return [own[2:] for own in times]


def text(report: dict[str, Any]) -> str:
    header = ["optimizer", "step (CPU ms)", "with error feedback", "it adds", "spread", "share of a batch"]
    lines = [LINE.format(**row).split(" | ") for row in report["rows"]]
    return (
        f"SmolLM2-135M with {report['layers']} of {LAYERS} layers; a batch of {BATCH_TOKENS:,} tokens computes for "
        f"{report['forward_and_backward_s']:.0f} s.\n\n{results.table(header, lines)}\n"
        f"Muon takes {report['muon_over_emerging_optimizers']:.2f} times as long as emerging-optimizers' own.\n"
    )


if __name__ == "__main__":
    sys.exit(main())
