# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Whole training runs in turns on the same ranks: the product's own loop with all that belongs to a run."""

import shlex
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.pipeline_parallel.schedules import backward_step, deallocate_output_tensor, forward_step
from megatron.core.utils import get_model_config

from benchmarks import turns
from benchmarks.contenders import LIMIT
from benchmarks.processes import Pool
from megatron_async.config import arguments
from megatron_async.mcore.training import get_args
from megatron_async.models import gpt
from megatron_async.schedules import StageCosts, make_schedule, simulate
from megatron_async.training import run
from megatron_async.training.loop import Loop
from megatron_async.training.steps import activations

STAGES = 2
VOCABULARY = 5120
"""The quick start's."""

BASE = f"""--device cpu --pipeline-model-parallel-size {STAGES} --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine
    --lr-warmup-iters 2 --weight-decay 0.1 --eval-interval 100000 --eval-iters 0 --log-interval 1"""


@dataclass(frozen=True, slots=True)
class Model:
    """A model, its split into stages and its micro-batch."""

    arguments: str
    micro_batch_size: int


MODELS: Mapping[str, Model] = {
    # The quick start's split: the head costs about as much as the two layers that the last stage has fewer.
    "tiny": Model("--model tiny --decoder-first-pipeline-num-layers 5", 16),
    "moe-10b-hybrid-mini": Model("--model moe-10b-hybrid-mini", 8),
}

CLIP, NO_CLIP, MUON = "--clip-grad 1.0", "--clip-grad 0", "--optimizer muon"
ERROR_FEEDBACK = "--staleness-correction error-feedback"
EVERYTHING = f"{CLIP} {MUON}"

WHOLE: Mapping[str, str] = {
    LIMIT: f"--pipeline-schedule 2bw {EVERYTHING} {ERROR_FEEDBACK}",
    "1f1b": f"--pipeline-schedule 1f1b {EVERYTHING} METRICS",
    "2bw": f"--pipeline-schedule 2bw {EVERYTHING} {ERROR_FEEDBACK} METRICS",
}
"""The comparison: compute alone, Megatron's 1F1B, and 2BW with error feedback; the last two with everything on."""

FEATURES: Mapping[str, str] = {
    LIMIT: WHOLE[LIMIT],
    "bare": f"--pipeline-schedule 2bw --optimizer adam {NO_CLIP}",
    "clipping": f"--pipeline-schedule 2bw --optimizer adam {CLIP}",
    "metrics": f"--pipeline-schedule 2bw --optimizer adam {NO_CLIP} METRICS",
    "muon": f"--pipeline-schedule 2bw {MUON} {NO_CLIP}",
    "muon, error feedback": f"--pipeline-schedule 2bw {MUON} {NO_CLIP} {ERROR_FEEDBACK}",
    "everything": f"--pipeline-schedule 2bw {EVERYTHING} {ERROR_FEEDBACK} METRICS",
}
"""Compute alone, and each feature on top of the bare schedule."""

_WARM_UP = 3


@dataclass(frozen=True, slots=True)
class Alone:
    """Milliseconds of one batch of a stage that talks to nobody: all its forwards, all its backwards, its update."""

    forwards: float
    backwards: float
    update: float

    @property
    def total(self) -> float:
        return self.forwards + self.backwards + self.update


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds per batch of one variant: median and distance of the quartiles over all its batches."""

    median: float
    spread: float
    batches: int

    @classmethod
    def of(cls, milliseconds: Sequence[float]) -> "Timing":
        lower, median, upper = statistics.quantiles(milliseconds, n=4, method="inclusive")
        return cls(median, upper - lower, len(milliseconds))


def in_turns(
    model: Model,
    variants: Mapping[str, str],
    data: Sequence[str],
    microbatches: int,
    rounds: int,
    batches: int,
    folder: Path,
    *,
    job: str = "benchmarks.training:batches",
) -> list[dict[str, list[Any]]]:
    """Train every variant in turns; return, for each rank, the results of the batches after the warm-up.

    Args:
        model: what is trained.
        variants: name -> arguments on top of `BASE`; METRICS stands for the logs of a run. The one called
            `LIMIT` computes its stage and steps its optimizer, and talks to nobody; of its batches come `Alone`.
        data: arguments that name the data.
        folder: for metrics files.
        job: trains a run and returns something for each batch; milliseconds by default.
    """
    found: list[dict[str, list[Any]]] = [{name: [] for name in variants} for _ in range(STAGES)]
    with Pool(pinned=True) as pool:
        for turn in range(rounds):
            for name, variant in variants.items():
                logs = folder / f"{name.replace(' ', '-').replace(',', '')}-{turn}"
                options = variant.replace("METRICS", f"--metrics-file {logs}.jsonl --tensorboard-dir {logs}")
                line = command_line(model, options, data, microbatches, _WARM_UP + batches + 2)
                train = "benchmarks.training:alone" if name == LIMIT else job
                ranks = pool.run(train, line, ranks=STAGES, timeout=150 + 4 * batches)
                for own, results in zip(found, ranks, strict=True):
                    # The pipe fills during the first batches and drains after the last.
                    own[name] += results[_WARM_UP : _WARM_UP + batches]
    return found


def command_line(model: Model, options: str, data: Sequence[str], microbatches: int, batches: int) -> list[str]:
    """Arguments of a run of so many batches of M micro-batches."""
    return [
        *shlex.split(f"{BASE} {model.arguments} {options}"),
        *data,
        *f"--micro-batch-size {model.micro_batch_size}".split(),
        *f"--global-batch-size {model.micro_batch_size * microbatches} --train-iters {batches}".split(),
    ]


def one_run[Result](line: Sequence[str], action: Callable[[Loop], Result]) -> Result:
    """Build a run on this rank, let `action` have it, and end it."""
    loop = run.build(arguments.parse(line))
    result = action(loop)
    loop.metrics.close()
    run.close()
    return result


def batches(line: Sequence[str]) -> list[float]:
    """Train on this rank; return the milliseconds of each batch."""
    return one_run(line, _batches)


def alone(line: Sequence[str]) -> list[Alone]:
    """Run this rank's stage of a run by itself."""
    return one_run(line, _alone)


def _batches(loop: Loop) -> list[float]:
    milliseconds: list[float] = []
    forward = loop.metrics.batch

    def note(numbers: Any) -> None:
        milliseconds.append(numbers.elapsed * 1e3)
        forward(numbers)

    loop.metrics.batch = note  # type: ignore[method-assign]
    loop.run()
    return milliseconds


def forward_alone(loop: Loop) -> tuple[Any, torch.Tensor | None, torch.Tensor]:
    """One forward of this rank's chunk on what a neighbor might have sent: the chunk, its input and its output."""
    steps: Any = loop._steps  # the chunk as a run has it: buffers, generations, versions
    (chunk,), args = steps.chunks, get_args()
    config = get_model_config(chunk.module)
    source = None
    if not chunk.first:  # tokens that differ, for the routers
        source = torch.randn(activations(args, config).shape, generator=torch.Generator().manual_seed(1))
        source.requires_grad_()
    output, _ = forward_step(
        gpt.ForwardStep(args),
        chunk.data_iterator,
        chunk.module,
        get_num_microbatches(),
        source,
        [],
        config,
        1,
        is_last_stage=chunk.last,
    )
    return chunk, source, output


def _alone(loop: Loop) -> list[Alone]:
    """A stage's forwards, backwards and optimizer steps with nothing in between."""
    config, optimizer = get_model_config(loop.model[0]), loop._optimizer
    shape, microbatches = activations(get_args(), config).shape, get_num_microbatches()
    loop.model[0].train()
    found = []
    for _ in range(get_args().train_iters):
        start = time.perf_counter()
        forwards = backwards = 0.0
        loop.model[0].zero_grad_buffer()
        for _ in range(microbatches):
            entered = time.perf_counter()
            chunk, source, output = forward_alone(loop)
            forwarded = time.perf_counter()
            gradient = None if chunk.last else torch.full(shape, 1e-3)
            deallocate_output_tensor(output, config.deallocate_pipeline_outputs)
            backward_step(source, output, gradient, config)
            forwards += forwarded - entered
            backwards += time.perf_counter() - forwarded
        optimizer.prepare_grads()
        optimizer.step_with_ready_grads()
        update = time.perf_counter() - start - forwards - backwards
        found.append(Alone(1e3 * forwards, 1e3 * backwards, 1e3 * update))
    return found


def timings(ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Timing]:
    """Each variant's time on its slowest rank."""
    return {name: max((Timing.of(rank[name]) for rank in ranks), key=lambda timing: timing.median) for name in ranks[0]}


def ratio(ranks: Sequence[Mapping[str, Sequence[float]]], name: str, other: str, batches: int) -> float:
    """How many times the other variant's time one takes; turns of so many batches, of a round, follow each other."""

    def by_turn(times: Sequence[float]) -> list[Sequence[float]]:
        return [times[start : start + batches] for start in range(0, len(times), batches)]

    own, base = ([by_turn(rank[variant]) for rank in ranks] for variant in (name, other))
    return turns.ratio(own, base)


def milliseconds(rank: Mapping[str, Sequence[Any]]) -> dict[str, list[float]]:
    """What `in_turns` found on a rank, whole batches only."""
    return {
        name: [batch.total if isinstance(batch, Alone) else batch for batch in batches]
        for name, batches in rank.items()
    }


def stage_costs(ranks: Sequence[Mapping[str, Sequence[Any]]], microbatches: int) -> list[StageCosts]:
    """Compute alone, for each stage: the medians of its parts, in milliseconds, those of one of M micro-batches."""

    def median(batches: Sequence[Alone], part: str) -> float:
        return statistics.median(getattr(batch, part) for batch in batches)

    return [
        StageCosts(
            forward=median(rank[LIMIT], "forwards") / microbatches,
            backward=median(rank[LIMIT], "backwards") / microbatches,
            update=median(rank[LIMIT], "update"),
        )
        for rank in ranks
    ]


def largest_speedup(costs: Sequence[StageCosts], microbatches: int) -> float:
    """What 2BW can gain over 1F1B with such stages, where nothing but compute takes time.

    Without a bubble, the slowest stage is all there is; 1F1B is simulated from its table. On balanced stages whose
    updates take no time this is (M + P - 1) / M. An update is in no bubble: all stages make it at the same time.
    """
    short, long = (
        simulate(make_schedule("1f1b", len(costs), microbatches, batches), costs).makespan for batches in (2, 3)
    )
    return (long - short) / max(microbatches * (stage.forward + stage.backward) + stage.update for stage in costs)
