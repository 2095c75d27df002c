# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Requests to end, gradients that are not finite, disks that are full: all ranks do the same, nothing is lost."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.processes import Pool
from megatron_async.checkpoint import folder
from megatron_async.files import read_json_lines
from tests.distributed import impatient
from tests.distributed.jobs import BASE, Outcome

TWO_BW = (
    "--optimizer adam --staleness-correction error-feedback --pipeline-model-parallel-size 2 --pipeline-schedule 2bw"
)
SCHEDULES = {"2bw": TWO_BW, "1f1b": "--optimizer adam --pipeline-model-parallel-size 2"}
ROOT = Path(__file__).resolve().parents[2]


def train(pool: Pool, arguments: str) -> list[Outcome]:
    return pool.run("tests.distributed.jobs:train", arguments.split(), ranks=2, timeout=600)


@pytest.mark.parametrize(
    ("schedule", "moment", "rank", "stopped_after"),
    [
        # Asked while U(1) is made. The next reduction is that of batch 2 on stage 0 and of batch 3 on stage 1; two
        # batches after it all stop.
        ("2bw", "training", 0, 5),
        ("2bw", "training", 1, 6),
        ("1f1b", "training", 1, 3),
        ("2bw", "start-up", 0, 0),
        ("2bw", "evaluation", 1, 3),
        ("2bw", "save", 0, 3),
        ("2bw", "asynchronous save", 0, 3),
    ],
)
def test_one_rank_is_asked_to_end(pool, tmp_path, schedule, moment, rank, stopped_after):
    interval = {
        "evaluation": "--eval-interval 3 --eval-iters 1 --save-interval 100",
        "save": "--save-interval 3",
        "asynchronous save": "--save-interval 3 --async-save",
    }
    files = f"--save {tmp_path} --load {tmp_path} {interval.get(moment, '--save-interval 100')}"
    arguments = f"{SCHEDULES[schedule]} --train-iters 8 {files}"
    parts = pool.run(
        "tests.distributed.resume_jobs:train_signaled", arguments.split(), rank, moment, ranks=2, timeout=600
    )
    assert [part.status for part in parts] == [85, 85]
    done = len(parts[0].grad_norms)
    assert done == len(parts[1].grad_norms) == stopped_after
    found = folder.newest(tmp_path)
    assert (found.iteration if found else 0) == done
    rest, whole = train(pool, arguments), train(pool, f"{SCHEDULES[schedule]} --train-iters 8")
    assert rest[1].losses == whole[1].losses[done:]
    for name, value in whole[0].weights.items():
        np.testing.assert_array_equal(rest[0].weights[name], value, err_msg=name)


def test_without_a_folder_the_status_says_that_nothing_was_saved(pool):
    """Neither do Megatron's own handlers take the signal away."""
    handlers = "--exit-signal-handler --exit-signal-handler-for-training"
    arguments = f"{TWO_BW} --train-iters 8 {handlers}".split()
    parts = pool.run("tests.distributed.resume_jobs:train_signaled", arguments, 0, "training", ranks=2, timeout=600)
    assert [part.status for part in parts] == [143, 143]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_too_many_skipped_updates_stop_every_rank(pool, schedule):
    arguments = f"{SCHEDULES[schedule]} --train-iters 20 --max-consecutive-skips 3".split()
    messages = pool.run("tests.distributed.resume_jobs:train_with_nan", arguments, 16, ranks=2, timeout=600)
    for message in messages:
        numbers = re.search(r"(\d+) updates in a row .*iterations 3 to (\d+), samples 16 to (\d+);", message)
        assert numbers, message
        assert 3 <= int(numbers[1]) <= 6 and int(numbers[3]) == int(numbers[2]) * 8 - 1


@pytest.mark.parametrize(("place", "rank"), [("tensors", 1), ("read back", 1), ("manifest", 0)])
def test_a_full_disk_is_named_on_every_rank_and_the_old_checkpoint_stays(pool, tmp_path, place, rank):
    train(pool, f"{TWO_BW} --save {tmp_path} --save-interval 100 --exit-interval 2")
    arguments = f"{TWO_BW} --save {tmp_path} --load {tmp_path} --save-interval 4".split()
    messages = pool.run("tests.distributed.resume_jobs:save_fails", arguments, rank, place, ranks=2, timeout=600)
    for message in messages:
        assert "iteration 4" in message and "No space left on device" in message, message
    assert [(entry.iteration, entry.problems) for entry in folder.checkpoints(tmp_path)] == [(2, ())]
    assert len(train(pool, f"{TWO_BW} --load {tmp_path}")[0].grad_norms) == 4


@pytest.fixture
def small_disk(tmp_path: Path):
    """Makes a file system of a given size."""
    mounted: list[Path] = []

    def make(size: int) -> Path:
        place = tmp_path / "small"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
        if subprocess.run(command, check=False, capture_output=True).returncode != 0:
            pytest.skip("mounting a small file system needs root")
        mounted.append(place)
        return place

    yield make
    for place in mounted:
        subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_is_really_full(pool, tmp_path, small_disk):
    train(pool, f"{TWO_BW} --save {tmp_path} --save-interval 100 --exit-interval 2")
    first = tmp_path / folder.name_of(2)
    disk = small_disk(int(1.6 * sum(file.stat().st_size for file in first.iterdir())))
    shutil.copytree(first, disk / first.name)
    arguments = f"{TWO_BW} --save {disk} --load {disk} --save-interval 4".split()
    messages = pool.run("tests.distributed.resume_jobs:save_fails", arguments, -1, "manifest", ranks=2, timeout=600)
    for message in messages:
        assert "iteration 4" in message and "No space left on device" in message, message
    assert [(entry.iteration, entry.problems) for entry in folder.checkpoints(disk)] == [(2, ())]
    assert not any((disk / folder.STAGING).iterdir())


def test_a_folder_that_cannot_be_written_to_is_refused_before_the_first_batch(pool, tmp_path):
    (tmp_path / ".lock").mkdir()  # what no rights show
    arguments = f"{TWO_BW} --save {tmp_path} --save-interval 100".split()
    for message in pool.run("tests.distributed.resume_jobs:save_fails", arguments, -1, "manifest", ranks=2):
        assert message.startswith(f"--save {tmp_path} cannot be written to: rank 0: IsADirectoryError")


def test_a_checkpoint_of_another_model_is_refused_before_anything_is_loaded(pool, tmp_path):
    train(pool, f"{TWO_BW} --save {tmp_path} --save-interval 100 --exit-interval 2")
    command = [sys.executable, "-m", "megatron_async.pretrain", *BASE, "--gradient-delay", "1", "--hidden-size", "64"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    refused = subprocess.run(
        [*command, "--load", str(tmp_path)], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert refused.returncode == 2
    assert "--hidden-size is 64" in refused.stderr and "saved with 32" in refused.stderr


def launch(folder: Path, *arguments: str, module: str = "megatron_async.pretrain") -> subprocess.Popen[str]:
    """The launcher of the SLURM script with two ranks."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [
        *(sys.executable, "examples/slurm/launch.py", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"),
        *("--master-port", "29611", "-m", module, *BASE, *TWO_BW.split()),
        *("--save", str(folder), "--load", str(folder), "--save-interval", "2", "--log-interval", "1", *arguments),
    ]
    log = (folder / "log.txt").open("a")
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, text=True)


def wait_for_batches(folder: Path) -> None:
    deadline = time.monotonic() + 300
    while "iteration        2/" not in (folder / "log.txt").read_text():
        assert time.monotonic() < deadline, (folder / "log.txt").read_text()[-3000:]
        time.sleep(0.2)


def test_signal_to_the_launcher(tmp_path):
    """SIGUSR1 to the launcher of the job script: saved, and the status on which it requeues."""
    (tmp_path / "log.txt").touch()
    job = launch(tmp_path, "--train-iters", "100000")
    wait_for_batches(tmp_path)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(300) == 85, (tmp_path / "log.txt").read_text()[-3000:]
    assert folder.newest(tmp_path) is not None


def test_a_killed_rank_ends_the_others(tmp_path):
    (tmp_path / "log.txt").touch()
    job = launch(tmp_path, "--train-iters", "100000", "--save-interval", "100000")
    wait_for_batches(tmp_path)
    ranks = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True, check=True).stdout.split()
    os.kill(int(ranks[1]), signal.SIGKILL)
    assert job.wait(120) not in (0, 85)
    said = (tmp_path / "log.txt").read_text()
    assert "megatron_async: rank 0 failed: StageFailure: rank 0 failed in" in said and "rank 1" in said


def test_a_stalled_rank_ends_the_others(tmp_path):
    log = tmp_path / "log.txt"
    log.touch()
    arguments = ("--train-iters", "100000", "--save-interval", "100000")
    job = launch(tmp_path, *arguments, module="tests.distributed.impatient")
    wait_for_batches(tmp_path)
    ranks = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True, check=True).stdout.split()
    os.kill(int(ranks[1]), signal.SIGSTOP)
    stalled = time.monotonic()
    try:
        while "megatron_async: rank 0 failed" not in log.read_text():
            assert time.monotonic() < stalled + 6 * impatient.SECONDS, log.read_text()[-3000:]
            time.sleep(0.1)
    finally:
        os.kill(int(ranks[1]), signal.SIGKILL)
    assert job.wait(60) not in (0, 85)
    said = log.read_text()
    assert re.search(r"rank 0 failed: StageFailure: rank 0 failed in \w\S+ of batch \d+, action \d+", said)
    assert "nothing arrived from rank 1" in said or "rank 1 did not take what was sent" in said
    assert re.search(r"rank 0 failed\. Longest silent: rank 1 \(", said) and "silent for" in said


def test_wandb_goes_on_with_the_same_run(pool, tmp_path):
    """Against a client that writes down what it is asked for; no step is logged twice."""
    record = tmp_path / "wandb.jsonl"
    files = f"--save {tmp_path} --load {tmp_path} --save-interval 100 --wandb-project test --wandb-exp-name resumed"
    evaluate = "--eval-interval 3 --eval-iters 1"
    for stop in (3, 100):
        arguments = f"{TWO_BW} {files} {evaluate} --exit-interval {stop}".split()
        pool.run("tests.distributed.resume_jobs:train_with_wandb", arguments, str(record), ranks=2)
    lines = read_json_lines(record)
    first, second = [line for line in lines if "resume" in line]
    assert (first["resume"], second["resume"]) == (None, "allow")
    assert {line["run"] for line in lines} == {first["run"]}
    for name, steps in {"lm loss": [1, 2, 3, 4, 5, 6], "lm loss validation": [3, 6]}.items():
        assert [line["step"] for line in lines if name in line.get("names", ())] == steps
