# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Options that act as in Megatron, each given to a short run: does it have an effect, and the right one?

`python -m tests.distributed.options` (`make options`) runs every case; the tests run a few. In a case, words before "|"
belong to the run that it is compared with too.
"""

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from rich.console import Console

from benchmarks.processes import JobFailed, Pool
from tests.distributed.jobs import BASE, SMALL_CORPUS, Outcome
from tests.distributed.matrix import MODELS

# Megatron's defaults where the other tests have a modern block, so that its options show an effect.
_MODERN = "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope".split()
PLAIN = [*(word for word in BASE if word not in _MODERN), *"--train-iters 4 --global-batch-size 4".split()]
STAGES = "--pipeline-model-parallel-size 2"
TWO_BW = f"{STAGES} --pipeline-schedule 2bw"
# Large steps, such as those of a decoupled rate, carry rounding errors on.
TOLERANCE, SET_TOLERANCE, HALF_TOLERANCE = 2e-5, 1e-3, 1e-2
LAYOUTS = {
    "2BW": (2, TWO_BW),
    "2BW x TP2": (4, f"{TWO_BW} --tensor-model-parallel-size 2 --sequence-parallel"),
    "2BW x DP2": (4, TWO_BW),
    "1F1B": (2, STAGES),
    "1F1B, two chunks": (4, "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2"),
    "1F1B x DP2, two chunks": (4, f"{STAGES} --num-virtual-stages-per-pipeline-rank 2"),
    "DP2": (2, ""),
    "TP2 x EP2": (4, "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2"),
}
"""Ranks and words by the layout's name; those with a delay are compared with the delay oracle."""
EXPERTS = (
    "--num-experts 4 --moe-ffn-hidden-size 32 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
    "--disable-bias-linear"
)

DELTA_NET = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-key-head-dim 8 "
    "--linear-value-head-dim 8 --linear-num-key-heads 2 --linear-num-value-heads 4 --normalization RMSNorm "
    "--disable-bias-linear"
)

# (layout, context) -> cases with other numbers than without the option, and those of one process.
CHANGES = {
    ("2BW", ""): """
        --hidden-size 48
        --ffn-hidden-size 96
        --num-attention-heads 2
        --group-query-attention | --num-query-groups 2
        --num-query-groups 2 | --group-query-attention
        --kv-channels 16
        --norm-epsilon 1e-2
        --disable-bias-linear | --add-qkv-bias
        --disable-bias-linear
        --normalization RMSNorm
        --swiglu
        --swiglu | --glu-linear-offset 1.0
        --swiglu | --activation-func-clamp-value 0.01
        --squared-relu
        --quick-geglu
        --qk-layernorm
        --qk-l2-norm
        --softmax-type off-by-one
        --softmax-type learnable
        --attention-output-gate
        --window-size (4,0)
        --window-size (4,0) | --window-attn-skip-freq 2
        --position-embedding-type rope
        --position-embedding-type none
        --use-rotary-position-embeddings
        --position-embedding-type rope | --rotary-base 100
        --position-embedding-type rope | --rotary-percent 0.5
        --position-embedding-type rope | --rotary-interleaved
        --position-embedding-type rope | --rotary-seq-len-interpolation-factor 2
        --position-embedding-type rope | --use-rope-scaling
        --position-embedding-type rope --use-rope-scaling | --rope-scaling-factor 2.0
        --position-embedding-type rope | --no-rope-freq [0,1,0,1]
        --untie-embeddings-and-output-weights
        --init-method-std 0.1
        --embedding-init-method-std 0.5
        --use-mup --mup-base-hidden-size 16
        --use-mup --mup-base-hidden-size 16 | --mup-embedding-mult 2.0
        --use-mup --mup-base-hidden-size 16 | --mup-output-mult 2.0
        --use-mup --mup-base-hidden-size 16 | --mup-base-head-dim 4
        --use-mup --mup-base-hidden-size 16 | --mup-attn-scale-power 0.5
        --adam-beta1 0.5
        --adam-beta2 0.5
        --adam-eps 1e-2
        --weight-decay 10
        --qk-layernorm --weight-decay 10 | --apply-wd-to-qk-layernorm
        --qk-layernorm --weight-decay 10 | --no-weight-decay-cond-type apply_wd_to_qk_layernorm
        --weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 30
        --decoupled-lr 0.1
        --train-iters 8 --lr-decay-iters 4 --decoupled-lr 0.1 | --decoupled-min-lr 0.09
        --lr-decay-iters 8
        --lr-decay-style WSD --lr-wsd-decay-iters 2 | --lr-wsd-decay-style linear
        --lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-iters 2 | --lr-wsd-decay-iters 3
        --lr-warmup-iters 0 | --lr-warmup-fraction 0.5
        --lr-warmup-init 0.01
        --optimizer sgd | --sgd-momentum 0.1
        --optimizer lion | --lion-beta2 0.5
        --optimizer muon | --muon-nesterov
        --optimizer muon | --muon-scale-mode shape_scaling
        --optimizer muon | --muon-coefficient-type simple
        --optimizer muon | --muon-extra-scale-factor 0.5
        --dataloader-type cyclic
        """,
    ("2BW", EXPERTS): """
        --moe-router-num-groups 2 --moe-router-group-topk 1
        --moe-router-pre-softmax
        --moe-router-score-function sigmoid | --moe-router-topk-scaling-factor 2.5
        --moe-shared-expert-intermediate-size 32
        --moe-shared-expert-intermediate-size 32 | --moe-shared-expert-gate
        --moe-expert-capacity-factor 0.5
        --moe-expert-capacity-factor 0.5 | --moe-token-drop-policy position
        --moe-router-topk 1 --moe-router-pre-softmax | --moe-apply-probs-on-input
        """,
    ("2BW", DELTA_NET): """
        | --linear-conv-kernel-dim 2
        """,
    ("2BW", f"{MODELS['hybrid']} --normalization RMSNorm --disable-bias-linear"): """
        | --mamba-num-heads 2
        """,
    ("1F1B", EXPERTS): """
        --moe-router-load-balancing-type quantile_balancing | --moe-router-quantile-balancing-ema 0.5
        """,
    ("1F1B", "--fp16"): """
        | --loss-scale 8
        | --initial-loss-scale 8
        """,
}
# The numbers of the run without the options, which share a run: they are about memory, speed or the layout.
KEEPS = {
    ("2BW", ""): """
        --recompute-activations --mlp-chunks-for-training 2 --enable-experimental \
        --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 --apply-query-key-layer-scaling \
        --decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 2 --make-vocab-size-divisible-by 16 \
        --max-position-embeddings 32
        --padded-vocab-size 72
        --normalization RMSNorm | --apply-layernorm-1p
        """,
    ("2BW", EXPERTS): """
        --moe-layer-recompute --moe-router-dtype fp32
        --moe-expert-capacity-factor 2 | --moe-pad-expert-input-to-capacity
        """,
    ("2BW", "--num-layers 3 --decoder-first-pipeline-num-layers 2"): """
        --decoder-last-pipeline-num-layers 1
        """,
    ("2BW", "--num-layers 2"): """
        --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split
        """,
    ("2BW x TP2", "--normalization RMSNorm"): """
        --no-clone-scatter-output-in-embedding --use-tp-pp-dp-mapping
        """,
    ("2BW x DP2", ""): """
        --use-distributed-optimizer --ddp-bucket-size 2000 --use-tp-pp-dp-mapping
        --use-distributed-optimizer --ddp-num-buckets 3 --ddp-pad-buckets-for-high-nccl-busbw
        """,
    ("TP2 x EP2", f"{EXPERTS} --normalization RMSNorm"): """
        | --expert-tensor-parallel-size 1
        """,
    ("1F1B", ""): """
        --num-layers-per-virtual-pipeline-stage 1
        --num-virtual-stages-per-pipeline-rank 2
        """,
    ("1F1B, two chunks", "--num-layers 8"): """
        --no-overlap-p2p-communication
        """,
    ("1F1B x DP2, two chunks", ""): """
        --overlap-grad-reduce
        """,
    ("DP2", ""): """
        --overlap-grad-reduce --no-align-grad-reduce
        """,
}
# Random numbers: the first batch has the loss of Megatron's own 1F1B, whose forwards come in the same order.
RANDOM = {
    ("2BW", ""): """
        --hidden-dropout 0.5
        --attention-dropout 0.5
        """,
    ("2BW", EXPERTS): """
        --moe-input-jitter-eps 0.1
        --moe-router-force-load-balancing
        """,
}
# Options of the run that saves | of the run that loads: after it, the numbers of the undisturbed run, or others.
RESUMES = {
    "keeps": """
        --ckpt-fully-parallel-save-process-group ep_dp --ckpt-assume-constant-structure | \
        --ckpt-fully-parallel-load --ckpt-fully-parallel-load-exchange-algo gather_object \
        --no-ckpt-load-validate-sharding-integrity --exit-on-missing-checkpoint
        --no-ckpt-fully-parallel-save --no-save-rng | --no-load-rng --ckpt-fully-parallel-load \
        --ckpt-fully-parallel-load-process-group ep_dp --dist-ckpt-strictness raise_all
        """,
    "changes": """
        --no-save-optim | --no-load-optim
        """,
}
# Options that write files: "{}" is a folder, and there is a file in it afterwards.
WRITES = """
    --dump-param-to-param-group-map {}/map
    --tensorboard-dir {} --tensorboard-queue-size 1
    --profile --use-pytorch-profiler --profile-step-start 1 --profile-step-end 3 --tensorboard-dir {}/tensorboard
    """


# Inert options that Megatron refuses by themselves, or that leave variables in a process which its next run refuses.
APART = (
    *("--inference-fuse-tp-communication", "--inference-disable-triton-nvls-kernels", "--fp16-lm-cross-entropy"),
    *("--attention-backend", "--flash-attention-version"),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A run with an option, and the run that it is compared with.

    Attributes:
        kind: "changes" numbers, "keeps" them, or "random".
        layout: a key of `LAYOUTS`.
        base, option: words of both runs, and of the first alone.
    """

    kind: str
    layout: str
    base: str
    option: str

    @property
    def name(self) -> str:
        return f"{self.layout}: {self.base} | {self.option}"

    def given(self, more: str = "") -> tuple[str, int]:
        """Words and ranks of the run without the option, or with it."""
        ranks, words = LAYOUTS[self.layout]
        return f"{self.base} {more} {words}", ranks


def cases() -> Iterator[Case]:
    for kind, table in {"changes": CHANGES, "keeps": KEEPS, "random": RANDOM}.items():
        for (layout, context), lines in table.items():
            for line in lines_of(lines):
                before, _, option = line.rpartition("|")
                yield Case(kind, layout, f"{context} {before}".strip(), option.strip())


def numbers(outcome: Outcome) -> np.ndarray:
    return np.array([*outcome.losses, *outcome.grad_norms, *outcome.learning_rates])


def difference(given: Outcome, expected: Outcome) -> float:
    """Largest relative difference of their numbers."""
    right = numbers(expected)
    return float((np.abs(numbers(given) - right) / np.maximum(np.abs(right), 1e-9)).max())


def problem(case: Case, run: Callable[[str, int], Outcome]) -> str | None:
    """What is wrong with a case, or None. `run` trains: words, ranks -> what the last rank saw."""
    base, given = run(*case.given()), run(*case.given(case.option))
    if case.kind == "keeps":
        worst = difference(given, base)
        return None if worst <= TOLERANCE else f"changes numbers by {worst:.1e}"
    if np.array_equal(numbers(given), numbers(base)):
        return "has no effect"
    if case.kind == "random":
        synchronous = run(f"{case.base} {case.option} {STAGES}", 2)
        return None if given.losses[0] == synchronous.losses[0] else "draws other numbers than 1F1B"
    delay = "--gradient-delay 1" if "2BW" in case.layout else ""
    worst = difference(given, run(f"{case.base} {case.option} {delay}", 1))
    allowed = HALF_TOLERANCE if "--fp16" in case.base else TOLERANCE
    return None if worst <= allowed else f"differs from one process by {worst:.1e}"


def resume_problem(kind: str, line: str, run: Callable[[str, int], Outcome]) -> str | None:
    """What is wrong with a run that saves after its second batch and one that goes on from there, or None."""
    saving, loading = line.split("|")
    with TemporaryDirectory() as folder:
        whole = run(f"{TWO_BW} --train-iters 6 --save {folder} --save-interval 2 {saving}", 2)
        resumed = run(f"{TWO_BW} --train-iters 6 --load {folder} --ckpt-step 2 {loading}", 2)
    same = resumed.losses == whole.losses[2:]
    return None if same == (kind == "keeps") and len(resumed.losses) == 4 else f"{resumed.losses} after {whole.losses}"


def file_problem(line: str, run: Callable[[str, int], Outcome]) -> str | None:
    """What is wrong with an option that writes files, or None."""
    with TemporaryDirectory() as folder:
        given = run(f"{TWO_BW} {line.format(folder)}", 2)
        found = any(path.stat().st_size for path in Path(folder).rglob("*"))
    right = given.losses == run(TWO_BW, 2).losses
    return None if found and right else "changes numbers" if found else "writes nothing"


def sets_of_five(number: int = 6, seed: int = 20261129) -> list[str]:
    """Words of random sets of five cases that change numbers."""
    pool = [f"{case.base} {case.option}" for case in cases() if (case.kind, case.layout) == ("changes", "2BW")]
    generator = random.Random(seed)
    return [" ".join(generator.sample(pool, 5)) for _ in range(number)]


def set_problem(words: str, run: Callable[[str, int], Outcome]) -> str | None:
    """What is wrong with options together, or None: they are refused at once, or equal the delay oracle."""
    try:
        given = run(f"{words} {TWO_BW}", 2)
    except JobFailed as failure:
        if "ArgumentProblems" in str(failure):
            return None
        raise
    worst = difference(given, run(f"{words} --gradient-delay 1", 1))
    return None if worst <= SET_TOLERANCE else f"differs from one process by {worst:.1e}"


def other_value(action: argparse.Action) -> list[str]:
    """Words that give an option another value than its default."""
    flag = action.option_strings[0]
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        return [flag]
    if action.choices:
        return [flag, next(str(getattr(one, "name", one)) for one in action.choices if one != action.default)]
    return [flag, "attn" if action.dest.startswith("cuda_graph") else "7"]


def inert_words() -> str:
    """All options at once that the contract calls inert on CPUs or with a delay."""
    from megatron_async import platform

    platform.activate("cpu")
    from megatron_async.config.contract.check import rows_of
    from megatron_async.mcore.arguments import add_megatron_options

    parser = argparse.ArgumentParser(add_help=False, conflict_handler="resolve")
    add_megatron_options(parser)
    actions = {action.option_strings[0]: action for action in parser._actions if action.option_strings}
    inert = (flag for flag in actions if any(row.status == "inert here" for row, _ in rows_of(flag.lstrip("-"))))
    return " ".join(word for flag in inert if flag not in APART for word in other_value(actions[flag]))


def inert_problem(run: Callable[[str, int], Outcome]) -> str | None:
    """What is wrong with a run that is given every inert option, or None."""
    words = f"{TWO_BW} --position-embedding-type rope --use-distributed-optimizer"
    same = np.array_equal(numbers(run(f"{words} {inert_words()}", 2)), numbers(run(words, 2)))
    return None if same else "changes numbers"


def lines_of(text: str) -> Iterator[str]:
    return filter(None, (" ".join(line.split()) for line in text.splitlines()))


def checks(run: Callable[[str, int], Outcome]) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """Name of every check, and what tells its problem."""
    for case in cases():
        yield case.name, partial(problem, case, run)
    for kind, lines in RESUMES.items():
        yield from ((f"resume: {line}", partial(resume_problem, kind, line, run)) for line in lines_of(lines))
    yield from ((f"five: {words}", partial(set_problem, words, run)) for words in sets_of_five())
    yield from ((line, partial(file_problem, line, run)) for line in lines_of(WRITES))
    yield "every inert option", partial(inert_problem, run)


def runner(pool: Pool) -> Callable[[str, int], Outcome]:
    """Runs each command line once."""

    @cache
    def run(words: str, ranks: int) -> Outcome:
        return pool.run("tests.distributed.jobs:train", words.split(), 0.0, (), PLAIN, ranks=ranks, timeout=300)[-1]

    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    only = parser.parse_args().only
    pool, console, failures, count = Pool(SMALL_CORPUS), Console(width=150), 0, 0
    for name, check in checks(runner(pool)):
        if only not in name:
            continue
        try:
            found = check()
        except JobFailed as failure:
            found = next((line for line in reversed(str(failure).splitlines()) if "Error" in line), str(failure))
        count, failures = count + 1, failures + (found is not None)
        console.print(f"{name}: {found or 'right'}", style="red" if found else None, highlight=False)
    console.print(f"{count} cases, {failures} wrong")
    pool.close()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
