# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The launch scripts: valid bash, and arguments that a dry run of their cluster accepts."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = {"smollm2-135m": 8, "smollm2-360m": 8, "moe-2b": 8, "moe-10b-hybrid": 64}
STEPS = {"smollm2-135m": 15_000, "smollm2-360m": 20_000, "moe-2b": 47_684, "moe-10b-hybrid": 47_684}


def arguments_of(name: str, mode: str) -> list[str]:
    script = ROOT / "examples" / name / "pretrain.sh"
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    assert os.access(script, os.X_OK)
    environment = {"PATH": os.environ["PATH"], "MODE": mode, "TOKENIZER": "t", "DATA": "d", "SAVE": "s"}
    done = subprocess.run([script], env=environment | {"LAUNCH": "echo"}, capture_output=True, text=True, check=True)
    return shlex.split(done.stdout)


@pytest.mark.parametrize("name", SCRIPTS)
def test_both_modes_differ_in_the_schedule_alone(name):
    sync, delayed = arguments_of(name, "sync"), arguments_of(name, "async")
    assert sync[:-2] == delayed[: len(sync) - 2]
    assert sync[-2:] == ["--pipeline-schedule", "1f1b"]
    assert delayed[len(sync) - 2 :] == shlex.split(
        "--pipeline-schedule 2bw --staleness-correction error-feedback --correction-strength 1.0"
    )


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_stages_are_balanced(name, monkeypatch):
    from megatron_async import platform

    platform.activate("cpu")
    from megatron_async.config import arguments
    from megatron_async.planning.estimate import plan

    monkeypatch.setenv("WORLD_SIZE", str(SCRIPTS[name]))
    args = arguments.parse(["--device", "cpu", *arguments_of(name, "async"), "--dry-run"])
    assert (args.model, args.train_iters) == (name, STEPS[name])
    result = plan(args)
    assert result.simulated.steady_bubble_share < 0.07
    assert [layer for stage in result.stages for layer in stage.layers] == list(range(args.num_layers))
    assert max(sum(held.values()) for held in result.bytes_by_kind) < 80 * 2**30


def test_a_wrong_mode_is_refused():
    script = ROOT / "examples" / "smollm2-135m" / "pretrain.sh"
    environment = {"PATH": os.environ["PATH"], "MODE": "fast", "TOKENIZER": "t", "DATA": "d", "SAVE": "s"}
    done = subprocess.run([script], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "MODE=fast: must be sync or async\n")
