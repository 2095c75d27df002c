# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Wrong command lines: every rank ends at once with status 2, rank 0 says everything that is wrong."""

import os
import subprocess
import sys

import pytest

from tests.distributed.jobs import BASE

ASYNC = "--optimizer muon --pipeline-model-parallel-size 2 --pipeline-schedule 2bw"

# Arguments that are added to a working command line, and texts that must all be in the message.
WRONG = {
    "fewer micro-batches than stages": (
        "--global-batch-size 1",
        ["1 micro-batches", "for 2 stages", "--global-batch-size to at least 2"],
    ),
    "a batch that is not whole micro-batches": (
        "--micro-batch-size 2 --global-batch-size 9",
        ["1 problem", "--global-batch-size 9 is not", "--micro-batch-size 2 x data-parallel size 1 = 2. Take 8 or 10,"],
    ),
    "two sources of data": (
        "--per-split-data-args-path /nowhere.json",
        ["2 problems", "--mock-data and --per-split-data-args-path exclude each other", "/nowhere.json"],
    ),
    "unknown optimizer": ("--optimizer muno", ["1 problem", "--optimizer", "'muno'", "did you mean muon?"]),
    "unknown model": ("--model smollm9", ["--model smollm9", "Known:", "tiny"]),
    "layers not divisible": ("--num-layers 5", ["--num-layers 5", "--pipeline-model-parallel-size 2"]),
    "a layout that drops a layer": (
        "--pipeline-model-parallel-layout Ett|tL",
        ["--pipeline-model-parallel-layout Ett|tL", "3 decoder layers", "--num-layers is 4"],
    ),
    "a layout without virtual stages under wpipe": (
        "--pipeline-schedule wpipe --untie-embeddings-and-output-weights --pipeline-model-parallel-layout Ett|ttL",
        ["1 problem", "Ett|ttL has 2 parts", "needs 2 for each of 2 stages = 4"],
    ),
    "missing data": ("--data-path 1.0 /nowhere/corpus", ["/nowhere/corpus.bin"]),
    "fp16": ("--fp16", ["--fp16", "--bf16"]),
    "negative strength": (
        "--staleness-correction error-feedback --correction-strength -0.5",
        ["--correction-strength -0.5", "at least 0"],
    ),
    "strength not finite": (
        "--staleness-correction error-feedback --correction-strength nan",
        ["--correction-strength nan", "finite"],
    ),
    "unknown argument": ("--pipeline-shedule wpipe", ["--pipeline-shedule", "did you mean --pipeline-schedule"]),
    "unknown schedule": ("--pipeline-schedule 3bw", ["--pipeline-schedule", "3bw", "2bw", "wpipe"]),
    "correction without a delay": (
        "--pipeline-schedule 1f1b --staleness-correction error-feedback",
        ["--staleness-correction error-feedback", "1f1b has none"],
    ),
    "delay in a pipeline": ("--gradient-delay 1", ["--gradient-delay", "one pipeline stage"]),
    "tied embeddings under wpipe": ("--pipeline-schedule wpipe", ["--untie-embeddings-and-output-weights"]),
    "several micro-batches under pipedream": ("--pipeline-schedule pipedream", ["--global-batch-size must be", "= 1"]),
    "too many synchronous batches": ("--sync-start-iters 4 --sync-cooldown-iters 4", ["is more than --train-iters 6"]),
    "warm-up longer than the run": ("--lr-warmup-iters 6", ["--lr-warmup-iters 6", "less than"]),
    "GPU wanted": ("--device cuda", ["--device cuda", "no usable CUDA device"]),
    "processes do not fit": ("--tensor-model-parallel-size 3", ["2 process(es)", "= 6"]),
    "processes do not fit the experts": (
        "--num-experts 4 --moe-ffn-hidden-size 32 --expert-model-parallel-size 2",
        ["2 process(es)", "--expert-tensor-parallel-size 1", "--expert-model-parallel-size 2 = 4"],
    ),
    "context parallel": ("--context-parallel-size 2", ["--context-parallel-size 2", "untested"]),
    "bias of filled experts": (
        "--num-experts 4 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
        "--moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity",
        ["--moe-pad-expert-input-to-capacity", "the bias would never move"],
    ),
    "files that cannot be written": (
        "--metrics-file /dev/null/metrics.jsonl --trace-file /tmp",
        ["2 problems", "metrics.jsonl: /dev/null is a file", "--trace-file /tmp: it is a folder"],
    ),
    "saves without an interval": ("--save /tmp/new", ["1 problem", "--save /tmp/new", "give --save-interval N"]),
    "a save folder that cannot be made": (
        "--save /dev/null/new --save-interval 3",
        ["1 problem", "--save /dev/null/new: /dev/null is a file. Name a folder"],
    ),
    "sgd in flat pieces": ("--optimizer sgd --use-distributed-optimizer", ["--optimizer sgd", "cannot save"]),
    "a ramp that does not end at the global batch size": (
        "--rampup-batch-size 4 3 32",
        ["--rampup-batch-size 4 3 32: --global-batch-size 8 must be START 4 and a multiple of INCREMENT 3"],
    ),
    "batches that shrink, counted in iterations": (
        "--step-batch-size-schedule 0:8,64:4",
        ["--train-samples instead of --train-iters", "must not become smaller"],
    ),
    "a schedule of batches that cannot be read": (
        "--step-batch-size-schedule 8",
        ["--step-batch-size-schedule 8", "Give TOKENS:SAMPLES pairs"],
    ),
    "logs that need CUDA, or a folder": (
        "--record-memory-history --log-memory-to-tensorboard --profile --log-progress",
        [
            "4 problems",
            "--record-memory-history: it asks CUDA",
            "--profile on CPUs",
            "in the folder of --save",
        ],
    ),
    "two at once": ("--num-layers 5 --fp16 --learning-rat 3", ["--num-layers 5", "--fp16", "--learning-rat"]),
}


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_command_line(pool, fault):
    added, expected = WRONG[fault]
    base = [word for word in BASE if word != "--mock-data"] if "--data-path" in added else BASE
    answers = pool.run("tests.distributed.jobs:command", [*base, *ASYNC.split(), *added.split()], ranks=2, timeout=60)
    (status, message), (other_status, silence) = answers
    assert (status, other_status) == (2, 2)
    assert silence == ""
    assert "nothing was started" in message and "Traceback" not in message
    missing = [text for text in expected if text not in message]
    assert not missing, message


def test_a_separate_process_ends_with_status_2():
    command = [sys.executable, "-m", "megatron_async.pretrain", *BASE, *ASYNC.split(), "--fp16"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 2
    assert "--fp16" in done.stderr and "Traceback" not in done.stderr


def test_a_process_that_no_launcher_started_runs_alone(pool):
    """Without MASTER_ADDR, RANK and the like it trains as the one process of a launcher does."""
    arguments = "--train-iters 3".split()
    (alone,) = pool.run("tests.distributed.jobs:train_without_launcher", arguments, ranks=1)
    (launched,) = pool.run("tests.distributed.jobs:train", arguments, ranks=1)
    assert len(alone.losses) > 0 and alone.losses == launched.losses


def test_wpipe_takes_its_virtual_stages_from_a_layout(pool):
    arguments = (
        "--pipeline-model-parallel-size 2 --pipeline-schedule wpipe --untie-embeddings-and-output-weights "
        "--optimizer adam --train-iters 3"
    ).split()
    even = pool.run("tests.distributed.jobs:train", arguments, ranks=2)[-1]
    layout = ["--pipeline-model-parallel-layout", "Et|t|t|tL"]
    given = pool.run("tests.distributed.jobs:train", [*arguments, *layout], ranks=2)[-1]
    assert len(given.losses) > 0 and given.losses == even.losses
