# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The log of a run from its first line: no warning that its user can do nothing about."""

import os
import re
import subprocess
import sys

import pytest

RUN = (
    "--device cpu --seq-length 16 --mock-data --tokenizer-type NullTokenizer --micro-batch-size 1 "
    "--global-batch-size 1 --train-iters 1 --lr 1e-3 --eval-iters 0 --log-interval 1 --num-workers 0"
)


@pytest.mark.parametrize("model", ["tiny", "nemotron-h-mini"])
def test_a_run_starts_without_warnings(model):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    done = subprocess.run(
        [sys.executable, "-m", "megatron_async.pretrain", "--model", model, *RUN.split()],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "1", "RANK": "0"},
    )
    assert done.returncode == 0, done.stderr
    assert "lm loss" in done.stdout
    assert not re.search("warn|deprecat", done.stdout + done.stderr, re.IGNORECASE), done.stdout + done.stderr
