# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A worker ends with its launcher, and only with one; a launcher ends its workers."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_async.launcher import end, exit_on_sigterm

LAUNCHER = """
import subprocess, sys
worker = "import time; from megatron_async.launcher import *; end_with_launcher(); print(0, flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", worker], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("launched", [True, False])
def test_a_worker_ends_with_its_launcher(launched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if launched:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", LAUNCHER], text=True, **pipes) as launcher:  # type: ignore[call-overload]
        pid = int(launcher.stdout.readline())
        launcher.kill()
    try:
        deadline = time.monotonic() + (30 if launched else 0.5)
        while lives(pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert lives(pid) is not launched
    finally:
        if lives(pid):
            subprocess.run(["kill", "-9", str(pid)], check=True)


def test_sigterm_ends_workers_one_that_ignores_it_too() -> None:
    stubborn = ["sh", "-c", "trap '' TERM; echo; exec sleep 60"]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE) for command in (["sleep", "60"], stubborn)]
    workers[1].stdout.readline()  # type: ignore[union-attr]

    @exit_on_sigterm()
    def wait() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            end(workers, 0.5)

    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # or this test could end pytest
    try:
        with pytest.raises(SystemExit, match="143"):
            wait()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [worker.returncode for worker in workers] == [-signal.SIGTERM, -signal.SIGKILL]
